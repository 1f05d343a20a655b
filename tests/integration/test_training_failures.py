"""What goes wrong in training: one sentence, the page's process unharmed, the next run works."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.child_process import run_python
from tests.support.run_values import block_of, events, metric, run_json
from tests.support.training_runs import fails_at, small
from trainer.config import NanPolicy, RunConfig, Workload
from trainer.runners import training_run
from trainer.train import TrainLoop, TrainStep
from trainer.training import rank_info


def run(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Run, check that the status returned is the one recorded, and return run.json."""
    folder.mkdir(exist_ok=True)
    status = training_run.run(config, folder)
    recorded = run_json(folder)
    assert recorded["status"] == status
    return recorded


def test_nan_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    ended = run(small(Workload.LINEAR, learning_rate=100.0), tmp_path)
    assert ended["status"] == "failed"
    assert "learning rate" in ended["reason"]
    kinds = [event.kind for event in events(tmp_path)]
    assert kinds.count("nan") == 1
    assert not (tmp_path / "traceback.txt").exists()
    assert len(metric(tmp_path, "train/loss")) < ended["total_steps"]


def test_nan_may_continue_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = small(Workload.LINEAR, learning_rate=100.0, nan_policy=NanPolicy.CONTINUE)
    threads = set(threading.enumerate())
    ended = run(config, tmp_path)
    assert ended["status"] == "finished"
    assert set(threading.enumerate()) <= threads
    assert ended["step"] == ended["total_steps"]
    assert [event.kind for event in events(tmp_path)].count("nan") == 1
    block = block_of(tmp_path)
    loss = block.keys.index("train/loss")
    assert block.nonfinite[loss].sum() > 0
    assert block.count[loss].sum() + block.nonfinite[loss].sum() == ended["total_steps"]
    assert block.nonfinite[block.keys.index("val/loss")].sum() > 0
    assert not (tmp_path / "last.pt").exists()


def test_an_exception_leaves_its_traceback_and_no_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[nn.Module]] = []
    clip = TrainStep._clip

    def explode(self: TrainStep) -> torch.Tensor:
        models.append(weakref.ref(self.model))
        if len(models) == 5:
            raise ValueError("a bug")
        return clip(self)

    monkeypatch.setattr(TrainStep, "_clip", explode)
    ended = run(small(Workload.DIGITS_MLP, max_grad_norm=1.0), tmp_path / "bad")
    assert ended["status"] == "failed"
    assert "ValueError: a bug" in ended["reason"]
    trace = (tmp_path / "bad" / "traceback.txt").read_text()
    assert "in explode" in trace
    failure = next(event for event in events(tmp_path / "bad") if event.kind == "error")
    assert failure.data["traceback"] == trace
    assert len(metric(tmp_path / "bad", "train/loss")) == 4
    gc.collect()
    assert models[0]() is None
    monkeypatch.undo()
    assert run(small(Workload.DIGITS_MLP, epochs=1), tmp_path / "next")["status"] == "finished"


def test_an_oom_is_its_own_event_with_the_memory_and_the_steps_before_it_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "CUDA out of memory. Tried to allocate 3.00 GiB."
    fails_at(monkeypatch, 5, torch.OutOfMemoryError(full))
    assert "3.00 GiB" in run(small(Workload.DIGITS_MLP), tmp_path)["reason"]
    assert len(metric(tmp_path, "train/loss")) == 4
    oom = next(event for event in events(tmp_path) if event.kind == "oom")
    assert oom.data["before"]["process/rss"] > 0
    assert oom.data["after"]["process/rss"] > 0


def test_what_fails_before_training_is_told_like_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(rank_info, "open_source", refuse)
    ended = run(small(Workload.LINEAR), tmp_path)
    assert ended["status"] == "failed"
    assert "RuntimeError: no driver" in ended["reason"]
    assert "in refuse" in (tmp_path / "traceback.txt").read_text()
    failure, alert = events(tmp_path)
    assert alert.data["rule"] == "run_failed"
    assert failure.text == ended["reason"]


def test_an_interrupt_closes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: TrainLoop) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainLoop, "_train_epoch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        training_run.run(small(Workload.DIGITS_MLP), tmp_path)
    assert run_json(tmp_path)["status"] == "failed"
    assert "interrupted" in run_json(tmp_path)["reason"]


def test_a_full_disk_costs_checkpoints_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    ended = run(small(Workload.DIGITS_MLP), tmp_path)
    assert ended["status"] == "finished"
    refused = [event for event in events(tmp_path) if event.kind == "checkpoint"]
    assert refused
    assert all(os.strerror(errno.ENOSPC) in event.text for event in refused)


ABORTING = """
import ctypes, sys, threading
from pathlib import Path
from stepscope.run.folder import fatal_signals_recorded

def deep(calls):
    return calls and deep(calls - 1)

def busy():
    while True:
        deep(300)

with fatal_signals_recorded(Path(sys.argv[1]), 0):
    for _ in range(4):
        threading.Thread(target=busy, daemon=True).start()
    abort = ctypes.CDLL(None).abort
    if sys.argv[2] == "main":
        abort()
    start = ctypes.cast(abort, ctypes.c_void_p)
    ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_void_p()), None, start, None)
    busy()
"""


@pytest.mark.parametrize("thread", ["main", "native"])
def test_an_abort_beside_running_threads_reads_no_frames_of_others(
    tmp_path: Path, thread: str
) -> None:
    """As torch's watchdog aborts: walking the frames of running threads may end in SIGSEGV."""
    done = run_python("-c", ABORTING, str(tmp_path), thread)
    assert done.returncode == -signal.SIGABRT
    lines = (tmp_path / "traceback.txt").read_text().splitlines()
    assert [line for line in lines if "in busy" in line or "in deep" in line] == []
    assert any("in <module>" in line for line in lines) == (thread == "main")
