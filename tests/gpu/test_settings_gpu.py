"""Settings of `stepscope watch --with` on a GPU: flags, pinned batches and dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.applied_settings import applied


def test_settings_of_a_gpu_are_in_effect_and_restored() -> None:
    precision = torch.get_float32_matmul_precision()
    words = "tf32 cudnn_benchmark channels_last bf16 fused pin_memory"
    with applied(words) as found:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        pinned = []
        for (batch,) in DataLoader(TensorDataset(torch.randn(32, 3, 8, 8)), batch_size=8):
            pinned.append(batch.is_pinned())
            optimizer.zero_grad()
            model(batch.cuda()).float().pow(2).mean().backward()
            optimizer.step()
        assert all(pinned)
        texts = {setting.name: found[setting.name]["text"] for setting in found.hooks.settings}
        assert found.states() == dict.fromkeys(texts, "in effect"), texts
    assert torch.get_float32_matmul_precision() == precision
    assert not torch.backends.cudnn.benchmark


def test_workers_are_refused_for_data_on_the_gpu() -> None:
    with applied("num_workers=2") as found:
        loader = DataLoader(TensorDataset(torch.randn(32, 4, device="cuda")), batch_size=8)
        assert loader.num_workers == 0
        assert "CUDA tensors" in found["num_workers"]["text"]


def train(batch: Tensor, copy: str = "to") -> list[float]:
    """Copy the batch in each of four steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        inputs = batch.to("cuda", torch.float32) if copy == "to" else batch.cuda()
        loss = model(inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("copy", ["to", "cuda"])
def test_copies_of_pinned_tensors_are_non_blocking(copy: str) -> None:
    batch = torch.randn(8, 4).pin_memory()
    bare = train(batch, copy)
    with applied("non_blocking") as found:
        assert train(batch, copy) == bare
        assert found["non_blocking"]["state"] == "in effect"
        assert found["non_blocking"]["text"].startswith("4 copies")
        assert batch.to("cpu", non_blocking=False) is batch
        assert torch.equal(batch.to(device="cuda", non_blocking=True).cpu(), batch)
        assert torch.Tensor.to is torch._C.TensorBase.to, "scripts compare it"
        assert found["non_blocking"]["text"].startswith("4 copies")


def test_pageable_and_rewritten_tensors_are_copied_as_before() -> None:
    with applied("non_blocking") as found:
        train(torch.randn(8, 4))
        train(torch.randn(8, 4).pin_memory().fill_(1))  # a buffer, which may be written again
        assert found["non_blocking"]["state"] == "refused"
        assert "Add pin_memory" in found["non_blocking"]["text"]
    with applied("non_blocking") as found:
        batch = torch.randn(8, 4).pin_memory()
        train(batch)
        batch.cuda()
        batch.zero_()
        train(batch)
        assert found["non_blocking"]["state"] == "refused"
        assert "writes into a pinned tensor" in found["non_blocking"]["text"]
