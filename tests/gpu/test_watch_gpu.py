"""A CUDA script under the hooks: nothing waits for the device, nothing changes, all is recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope import tracker
from stepscope.distributed.rendezvous import find_place
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.session.script_session import ScriptSession
from stepscope.tracker import Tracker
from stepscope.watch.hooks.state import TRIAL_BACKWARDS
from tests.gpu.conftest import waiting_raises
from tests.support.fake_live import hooked
from tests.support.installed_hooks import installed
from tests.support.run_values import metric

STEPS = 60
INITIAL_SCALE = 2.0**10  # torch's own, 2**16, overflows in the first step


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ScriptSession]:
    live = ScriptSession(find_place(tmp_path, "gpu", {}), name="gpu", kind=RunKind.WATCH)
    with installed(live):
        yield live
    live.close(RunStatus.FINISHED)


class Script:
    """A training loop that never waits for the device itself."""

    def __init__(self, *, width: int = 256, amp: bool = False, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1)).cuda()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3, fused=fused)
        self.scaler = torch.amp.GradScaler("cuda", INITIAL_SCALE, enabled=amp)
        data = TensorDataset(torch.randn(STEPS * 32, 64), torch.randn(STEPS * 32, 1))
        self.loader = DataLoader(data, batch_size=32, pin_memory=True)
        self.losses: list[torch.Tensor] = []

    def epoch(self) -> None:
        """Train once over the data."""
        for inputs, targets in self.loader:
            x, y = inputs.to("cuda", non_blocking=True), targets.cuda(non_blocking=True)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16, enabled=self.scaler.is_enabled()):
                loss = nn.functional.mse_loss(self.net(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.losses.append(loss.detach())

    def printed(self) -> list[float]:
        """The losses, read when all is done."""
        return [float(loss) for loss in self.losses]


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "fp16"])
def test_losses_are_the_same_and_arrive_whole(live: ScriptSession, amp: bool) -> None:
    watched = Script(amp=amp)
    watched.epoch()
    live.close(RunStatus.FINISHED)
    recorded = metric(live.recorder.folder, "train/loss")
    assert recorded.tolist() == pytest.approx(watched.printed(), rel=1e-6)
    assert len(metric(live.recorder.folder, "train/grad_norm")) == STEPS
    if amp:
        assert metric(live.recorder.folder, "train/amp_scale")[0] == INITIAL_SCALE


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_waits_for_the_device(live: ScriptSession, fused: bool) -> None:
    """Torch raises at every synchronizing call; GradScaler makes one itself unless fused."""
    script = Script(amp=fused, fused=fused)
    script.epoch()  # first calls allocate, which may synchronize
    torch.cuda.synchronize()
    with waiting_raises():
        script.epoch()
    live.close(RunStatus.FINISHED)
    assert len(metric(live.recorder.folder, "train/loss")) == 2 * STEPS


def test_copies_allocator_and_device_are_recorded(live: ScriptSession) -> None:
    script = Script()
    for _ in range(5):
        script.epoch()
        torch.cuda.synchronize()
        time.sleep(0.15)  # at least one tick of the sampler
    live.close(RunStatus.FINISHED)
    folder = live.recorder.folder
    copies = metric(folder, "perf/h2d")
    assert 0 < copies.sum() < metric(folder, "perf/step_time").sum()
    assert metric(folder, "memory/allocated", "samples")[-1] > 0
    assert read_run(folder).run_json["device"].startswith(("GPU-", "MIG-"))


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_captured_graph_is_not_disturbed(live: ScriptSession, mode: str) -> None:
    """`global` forbids every thread of the process what the capturing one may not do."""
    script = Script()
    script.epoch()
    x, y = torch.randn(32, 64, device="cuda"), torch.randn(32, 1, device="cuda")
    optimizer = torch.optim.Adam(script.net.parameters(), capturable=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(script.net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        loss = step()
        time.sleep(0.35)  # some ticks of the sampler
    before = None
    for _ in range(20):
        graph.replay()
        before = before if before is not None else loss.item()
    assert before is not None
    assert loss.item() < before


AMOUNTS = 5


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptSession]:
    monkeypatch.setattr(tracker, "_current", None)
    bare = ScriptSession(find_place(tmp_path, "amounts", {}), name="amounts", kind=RunKind.WATCH)
    yield bare
    bare.close(RunStatus.FINISHED)


def amounts(folder: Path, key: str) -> list[float]:
    """What was given, worked out from the rate."""
    rates, times = metric(folder, f"perf/{key}_per_sec"), metric(folder, "perf/step_time")
    found: list[float] = np.round(rates * times[-len(rates) :]).tolist()
    return found


def test_a_step_waits_for_no_amount(bare: ScriptSession) -> None:
    rec, number = Tracker(bare), torch.full((), 128, device="cuda")
    rec.step(loss=1.0, tokens=number)
    with waiting_raises():
        for _ in range(AMOUNTS):
            rec.step(loss=1.0, tokens=number)
        for _ in range(AMOUNTS):
            rec.log(tokens=number)
            rec.log(tokens=2)
            number += 1  # in place: what was logged before stays
            rec.step(loss=1.0, tokens=number)
    bare.close(RunStatus.FINISHED)
    assert amounts(bare.recorder.folder, "tokens") == [128] * AMOUNTS + [
        2 * number + 3 for number in range(128, 128 + AMOUNTS)
    ]


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_copies_are_timed_once_where_an_optimizer_follows(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudasim = pytest.importorskip("cudasim", reason="only the simulator counts its calls")
    monkeypatch.setattr("stepscope.watch.hooks.copies.MIN_INTERVAL_S", 0.0)  # each step is measured
    with hooked() as live:
        w = torch.nn.Parameter(torch.ones(3, device=first))
        for _ in range(TRIAL_BACKWARDS + 1):
            w.square().sum().backward()
        w = torch.nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.SGD([w], lr=0.1)
        w.square().sum().backward()
        optimizer.step()
        with cudasim.counted() as calls:
            torch.ones(3).to("cuda")
    assert live.devices == ([0] if first == "cuda" else [None, 0])
    assert sum(number for name, number in calls.items() if "EventRecord" in name) == 2
