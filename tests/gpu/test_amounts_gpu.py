"""Samples and tokens that a script gives as tensors on the GPU: no step waits for them.

On a GPU torch itself says where it would wait; on the simulator the calls are counted too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stepscope import tracker
from stepscope.distributed.rendezvous import find_place
from stepscope.run import RunKind, RunStatus
from stepscope.session.script_session import ScriptSession
from stepscope.tracker import Tracker
from stepscope.watch import hooks
from tests.gpu.conftest import waiting_raises
from tests.support.run_values import metric

STEPS = 5


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptSession]:
    monkeypatch.setattr(tracker, "_current", None)
    live = ScriptSession(find_place(tmp_path, "amounts", {}), name="amounts", kind=RunKind.WATCH)
    yield live
    live.close(RunStatus.FINISHED)


def amounts(folder: Path, key: str) -> list[float]:
    """What was given, worked out from the rate."""
    rates, times = metric(folder, f"perf/{key}_per_sec"), metric(folder, "perf/step_time")
    found: list[float] = np.round(rates * times[-len(rates) :]).tolist()
    return found


def test_a_step_waits_for_no_amount(live: ScriptSession) -> None:
    rec, number = Tracker(live), torch.full((), 128, device="cuda")
    rec.step(loss=1.0, tokens=number)
    with waiting_raises():
        for _ in range(STEPS):
            rec.step(loss=1.0, tokens=number)
        for _ in range(STEPS):
            rec.log(tokens=number)
            rec.log(tokens=2)
            number += 1  # in place: what was logged before stays
            rec.step(loss=1.0, tokens=number)
    live.close(RunStatus.FINISHED)
    assert amounts(live.recorder.folder, "tokens") == [128] * STEPS + [
        2 * number + 3 for number in range(128, 128 + STEPS)
    ]


def test_under_watch_they_belong_to_the_step_under_way(live: ScriptSession) -> None:
    attached = hooks.install(live)
    try:
        rec, number = Tracker(live, watched=True), torch.full((), 128, device="cuda")
        w = torch.nn.Parameter(torch.ones((), device="cuda"))
        optimizer = torch.optim.SGD([w], lr=0.1)
        w.square().backward()
        optimizer.step()
        with waiting_raises():
            for _ in range(STEPS):
                rec.step(tokens=number, samples=3)
                w.square().backward()
                optimizer.step()
    finally:
        attached.remove()
    live.close(RunStatus.FINISHED)
    assert amounts(live.recorder.folder, "tokens") == [128] * STEPS
    assert amounts(live.recorder.folder, "samples") == [3] * STEPS
