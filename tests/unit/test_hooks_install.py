"""When the hooks attach: after the script's own `import torch`, and only in its process."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.watch.hooks import install
from stepscope.watch.hooks.patching import PostImportHook
from stepscope.watch.hooks.step_timing import StepPhaseTimer
from tests.support.fake_live import FakeLive, hooked

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


def test_a_wrapper_around_ours_survives_our_going() -> None:
    original = torch.autograd.backward
    with hooked():
        ours = torch.autograd.backward
        theirs: Callable[..., None] = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
        torch.autograd.backward = theirs
    try:
        w = nn.Parameter(torch.ones(()))
        (w * 2).backward()
        assert torch.autograd.backward is theirs
        assert w.grad == 2
    finally:
        torch.autograd.backward = original


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


def test_removing_the_hooks_before_torch_came_leaves_no_finder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    finders = list(sys.meta_path)
    attached = install(FakeLive())
    assert len(sys.meta_path) == len(finders) + 1
    attached.remove()
    assert sys.meta_path == finders


def test_a_model_may_be_given_to_ddp_by_its_name_as_lightning_does() -> None:
    made: list[Any] = []

    class Wrapper:
        def __init__(self, module: object) -> None:
            made.append(module)

    Wrapper.__init__ = StepPhaseTimer().around_making(Wrapper.__init__)  # type: ignore[method-assign]
    Wrapper(module="by name")
    Wrapper("by position")
    assert made == ["by name", "by position"]
