"""When the hooks attach, and scripts without an optimizer: each outermost backward() is a step."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.watch import hooks
from stepscope.watch.hooks.patching import PostImportHook
from stepscope.watch.hooks.state import HELD
from tests.support.fake_live import FakeLive, hooked
from tests.support.installed_hooks import installed

PLACES: list[tuple[object, str]] = [
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "step"),
    (_BaseDataLoaderIter, "__next__"),
]


def test_everything_is_put_back() -> None:
    before = [getattr(owner, name) for owner, name in PLACES]
    hooks_before = dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
    with hooked():
        now = [getattr(owner, name) for owner, name in PLACES]
        assert not any(map(operator.is_, now, before))
    assert [getattr(owner, name) for owner, name in PLACES] == before
    assert sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks == hooks_before


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


def test_a_torch_without_a_version_does_not_end_the_script() -> None:
    with hooked():
        hooks._installed[-1]._attach(ModuleType("torch"))  # as a stub torch.py beside the script


def test_a_forked_child_records_nothing() -> None:
    with hooked() as live:
        w = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([w], lr=0.1)
        optimizer.step()
        child_id = os.fork()
        if child_id == 0:
            exit_code = 99
            try:
                # Torch itself refuses it where autograd has a thread for a GPU.
                with contextlib.suppress(RuntimeError):
                    (w * 1).backward()
                optimizer.step()
                exit_code = len(live.rows)
            finally:
                os._exit(exit_code)
        _, status = os.waitpid(child_id, 0)
        assert os.waitstatus_to_exitcode(status) == 1
        optimizer.step()
        assert len(live.rows) == 2


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


def train(w: nn.Parameter, steps: int, norms: list[float] | None = None) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (w - 1) ** 2
        loss.backward()
        if norms is not None:
            norms.append(nn.utils.clip_grad_norm_([w], 100.0).item())
        with torch.no_grad():
            assert w.grad is not None
            w -= 0.1 * w.grad
            w.grad = None
        losses.append(loss.item())
    return losses


def test_every_backward_is_a_step() -> None:
    with hooked() as live:
        losses = train(nn.Parameter(torch.tensor(3.0)), HELD + 4)
    assert live.values("train/loss") == losses
    assert [step for step, _ in live.rows] == list(range(1, len(losses) + 1))
    assert live.devices == [None]
    assert len(live.values("perf/step_time")) == len(losses) - 1
    assert live.boundaries == 5, "commands act from the step on at which it is certain"


def test_nothing_is_a_step_before_the_optimizer_is_made() -> None:
    with hooked() as live:
        w = nn.Parameter(torch.tensor(3.0))
        train(w, HELD - 1)  # such as a trial of how fast it is
        optimizer = torch.optim.SGD([w], lr=0.1)
        losses = []
        for _ in range(HELD + 1):
            (loss := w * 1).backward()
            losses.append(loss.item())
        assert live.rows == []
        optimizer.step()
    assert [step for step, _ in live.rows] == [1]
    assert live.values("train/loss") == [pytest.approx(sum(losses))]


@pytest.mark.parametrize(("made", "why"), [(True, "never stepped"), (False, "backward()")])
def test_why_nothing_was_recorded(made: bool, why: str) -> None:
    with installed(FakeLive()) as attached:
        w = nn.Parameter(torch.tensor(3.0))
        if made:
            torch.optim.SGD([w], lr=0.1)
            (w * 1).backward()
        said = attached.end() or ""
    assert said.startswith("No training step was seen: the script ")
    assert why in said


@pytest.mark.parametrize("steps", [2, HELD + 4])
def test_a_norm_belongs_to_the_backward_before_it(steps: int) -> None:
    """A short script is recorded at its end."""
    live, w = FakeLive(), nn.Parameter(torch.tensor(3.0))
    norms: list[float] = []
    with installed(live) as attached:
        for _ in range(steps):
            train(w, 1, norms)
        assert bool(live.rows) == (steps >= HELD)
        assert attached.end() is None
    rows = [(step, row["train/grad_norm"]) for step, row in live.rows if "train/grad_norm" in row]
    assert rows == list(enumerate(norms, start=1))
    assert len(live.values("train/loss")) == steps


@pytest.mark.parametrize("counts", [True, False])
def test_no_parameter_that_was_clipped_is_kept_alive(counts: bool) -> None:
    """Models one after another; the script may count its steps itself, by `rec.step`."""
    gone = []
    with hooked() as live:
        for _ in range(3):
            w = nn.Parameter(torch.tensor(3.0))
            for _ in range(HELD):
                (w * 1).backward()
                nn.utils.clip_grad_norm_([w], 1.0)
                live.recorder.step += counts
            gone.append(weakref.ref(w))
            del w
        assert [reference() for reference in gone] == [None] * 3


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
