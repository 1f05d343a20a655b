"""What the simulator claims of one process: memory, order and waiting, numbers, lasting errors."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MIB = 2**20
LATE_CYCLES = 200_000_000  # some 100 ms at 2 GHz


@pytest.fixture(autouse=True)
def started() -> None:
    """Start CUDA: statistics are empty, and the context takes memory, at the first use."""
    torch.ones(1, device="cuda").add_(1)


def test_a_fault_can_be_put_into_malloc(cudasim: ModuleType) -> None:
    torch.cuda.empty_cache()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    cudasim.fault("malloc:1")
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # the allocator tries again
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1
    del x


def test_a_pinned_buffer_that_is_filled_too_early_gives_wrong_data() -> None:
    """As on a GPU: the copy comes when the stream comes to it."""
    x = torch.arange(1000, dtype=torch.float32).pin_memory()
    torch.cuda.synchronize()
    torch.cuda._sleep(LATE_CYCLES)
    y = x.to("cuda", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    x.fill_(-1)
    event.synchronize()
    assert float(y[0]) == -1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_synchronizations_are_counted(cudasim: ModuleType) -> None:
    x = torch.randn(64, 64, device="cuda")
    (x @ x).sum().item()
    with cudasim.counted() as none:
        for _ in range(10):
            y = (x @ x).relu().sum()
    with cudasim.counted() as one:
        y.item()
    with cudasim.counted() as also:
        x.nonzero()
        x.cpu()
        torch.cuda.synchronize()
    assert cudasim.synchronizations(none) == 0, none
    assert cudasim.synchronizations(one) == 1, one
    assert cudasim.synchronizations(also) >= 3, also
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            y.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def net(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and 512 inputs for it; `torch.manual_seed` decides both."""
    if kind == "cnn":
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        return model, torch.randn(512, 1, 8, 8)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(8 * 32, 10)), torch.randn(512, 8, 32)


def losses(device: str, kind: str, dtype: torch.dtype | None, fused: bool) -> list[float]:
    """Train in float32, or under autocast to `dtype`; return the loss of each step."""
    torch.manual_seed(0)
    model, inputs = net(kind)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=fused)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    data = TensorDataset(inputs, torch.randint(0, 10, (512,)))
    found = []
    for _ in range(3):
        for batch in DataLoader(data, 64, pin_memory=device == "cuda"):
            x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
            optimizer.zero_grad()
            with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.detach())
    return [float(loss) for loss in found]


LIMITS = {None: 0.01, torch.bfloat16: 0.1, torch.float16: 0.03}


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_training_matches_the_cpu(kind: str) -> None:
    true = losses("cpu", kind, None, fused=False)
    for dtype, limit in LIMITS.items():
        for fused in (False, True):
            got = losses("cuda", kind, dtype, fused)
            error = max(abs(a - b) for a, b in zip(true, got, strict=True))
            assert error < limit, (dtype, fused)
