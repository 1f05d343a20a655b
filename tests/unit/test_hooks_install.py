"""When the hooks attach, and scripts without an optimizer: each outermost backward() is a step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from stepscope.watch.hooks.patching import PostImportHook
from stepscope.watch.hooks.state import TRIAL_BACKWARDS
from tests.support.fake_live import FakeLive, hooked
from tests.support.installed_hooks import installed


def test_what_cannot_attach_is_said_once_and_the_rest_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.nn.utils.clip_grad, "clip_grad_norm_")
    with hooked() as live:
        w = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([w], lr=0.1)
        (w * 1).backward()
        optimizer.step()
    assert live.values("train/loss") == [1.0]
    (record,) = caplog.records
    assert "train/grad_norm will be missing" in record.message


def test_a_module_is_waited_for_until_its_import_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "stepscope_late_module"
    path = tmp_path / f"{name}.py"
    path.write_text("raise ImportError('not yet')")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[ModuleType] = []
    waiting = PostImportHook(name, seen.append)
    waiting.start()
    try:
        with pytest.raises(ImportError, match="not yet"):
            __import__(name)
        path.write_text("ready = True  # and longer than before, so that no cached code is used")
        module = __import__(name)
        assert [m.ready for m in seen] == [True]
        assert module.__loader__.get_source(name).startswith("ready")
        assert waiting not in sys.meta_path
    finally:
        waiting.stop()
        sys.modules.pop(name, None)


def train(w: nn.Parameter, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (w - 1) ** 2
        loss.backward()
        with torch.no_grad():
            assert w.grad is not None
            w -= 0.1 * w.grad
            w.grad = None
        losses.append(loss.item())
    return losses


def test_without_an_optimizer_every_backward_after_the_first_ones_is_a_step() -> None:
    with hooked() as live:
        losses = train(nn.Parameter(torch.tensor(3.0)), TRIAL_BACKWARDS + 4)
    assert live.values("train/loss") == losses[TRIAL_BACKWARDS:]
    assert [step for step, _ in live.rows] == list(range(TRIAL_BACKWARDS + 1, len(losses) + 1))
    assert live.devices == [None]
    assert len(live.values("perf/step_time")) == 4
    assert live.boundaries == 4


def test_nothing_is_a_step_before_the_optimizer_is_made() -> None:
    with hooked() as live:
        w = nn.Parameter(torch.tensor(3.0))
        train(w, TRIAL_BACKWARDS)  # such as a trial of how fast it is
        optimizer = torch.optim.SGD([w], lr=0.1)
        (w * 2).backward()
        optimizer.step()
    assert [step for step, _ in live.rows] == [1]
    assert live.values("train/loss") == [pytest.approx(2 * w.item() + 0.4)]
    assert live.values("perf/step_time") == []


@pytest.mark.parametrize(
    ("made", "backwards", "why"),
    [(True, 1, "never stepped"), (False, 1, "no optimizer"), (False, 0, "never called backward()")],
)
def test_why_nothing_was_recorded(made: bool, backwards: int, why: str) -> None:
    with installed(FakeLive()) as attached:
        w = nn.Parameter(torch.tensor(3.0))
        if made:
            torch.optim.SGD([w], lr=0.1)
        train(w, backwards)
        reason = attached.end() or ""
    assert reason.startswith("No training step was seen: the script ")
    assert why in reason


def test_steps_that_the_script_counts_itself_add_up_no_loss() -> None:
    w = nn.Parameter(torch.tensor(3.0))
    with hooked() as live:
        for _ in range(3):
            (w * 1).backward()
            live.recorder.step += 1  # as `rec.step` does
        (w * 1).backward()
        torch.optim.SGD([w]).step()
    assert live.values("train/loss") == []


@pytest.mark.parametrize("first", ["zero_grad", "backward"])
def test_an_optimizer_that_was_made_unseen_keeps_its_first_loss(first: str) -> None:
    """As one that was copied, or made before the hooks were there."""
    w = nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.SGD([w], lr=0.1)
    losses = []
    with hooked() as live:
        for _ in range(3):
            if first == "zero_grad":
                optimizer.zero_grad()
            (loss := (w - 1) ** 2).backward()
            losses.append(loss.item())
            optimizer.step()
            if first == "backward":
                optimizer.zero_grad()
    assert live.values("train/loss") == losses
