"""Whatever a script hands over, no call raises, and what comes after it is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope import tracker
from stepscope.distributed.rendezvous import find_place
from stepscope.run import RunKind
from stepscope.session.script_session import ScriptSession
from stepscope.tracker import Tracker
from tests.support.run_values import events, metric


class Raises:
    """Whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)

    def __str__(self) -> str:
        raise LookupError

    __repr__ = __str__

    def __float__(self) -> float:
        raise LookupError

    __int__ = __index__ = __len__ = __bool__ = __float__  # type: ignore[assignment]
    __hash__ = __iter__ = __eq__ = __float__  # type: ignore[assignment]


NUMBERS = [True, -1, 2**63, 10**5000, math.nan, math.inf, 1e300, 1j]
OBJECTS = ["", "\ud800", b"\xff", "k" * 100_000, None, [], {"a": 1}, {1: 2}, Raises(), type]
ARRAYS = [np.float32(1), np.zeros(2), np.array("x"), np.datetime64("NaT")]
TENSORS = [torch.tensor(1.0), torch.zeros(2), torch.tensor(1j), torch.zeros((), requires_grad=True)]
TENSORS += [torch.empty(0), torch.tensor(1.0).to_sparse(), torch.empty((), device="meta")]
HOSTILE: list[Any] = [*NUMBERS, *OBJECTS, *ARRAYS, *TENSORS]


def tracker_calls(rec: Tracker, value: Any) -> list[Callable[[], object]]:
    return [
        lambda: rec.step(loss=value),
        lambda: rec.step(loss=value, samples=value, epoch=value),
        lambda: rec.step(value),
        lambda: rec.step({"train/loss": value, "a": 1.0}),
        lambda: rec.log(val_loss=value),
        lambda: rec.log(value),
        lambda: rec.log(samples=value, tokens=value),
        lambda: rec.step(loss=0.5, tokens=value),
        lambda: rec.event(value, data=value),
        lambda: rec.event("x", kind=value, text=value),
        lambda: rec.log({b"x": value, 3: value}),
        lambda: setattr(rec, "epoch", value),
        lambda: list(rec.batches([value, (value,), {"x": value}])),
    ]


def test_no_call_of_a_tracker_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(tracker, "_current", None)
    live = ScriptSession(
        find_place(tmp_path, "hostile", {}), name="hostile", kind=RunKind.INIT, sample=False
    )
    rec = Tracker(live)
    request.addfinalizer(rec.close)
    for _ in range(4):
        rec.step(loss=0.5)  # the short way
    for value in HOSTILE:
        for call in tracker_calls(rec, value):
            call()
    for epoch in (None, math.nan, "3/10", 2**70, 7.0):
        rec.step(loss=0.25, epoch=epoch)
    assert rec.epoch == 7
    rec.event("sane")
    rec.close()
    assert metric(live.recorder.folder, "train/loss")[-1] == 0.25
    assert "sane" in [event.text for event in events(live.recorder.folder)]
    assert len([record for record in caplog.records if record.exc_info]) <= 1
