"""Failures of the writer thread: an invalid row, an internal error, and a failed start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.run import RunStatus
from stepscope.store import StoreError, StoreReader, schema, writer_thread
from stepscope.store.blocks import Event
from stepscope.store.recorder import Recorder
from stepscope.store.writer_thread import WriterThread
from tests.support.run_values import steps_and_losses
from tests.support.waiting import wait_until

INVALID = Event(1.0, 1, 0, "mark", "no JSON", {"object": object()})


def texts(folder: Path) -> list[str]:
    with StoreReader(folder) as reader:
        return [event.text for event in reader.events()]


def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Delay the flushes until the returned function is called, so that all items are one batch."""
    go = threading.Event()
    flush = WriterThread._flush

    def when_released(self: WriterThread) -> bool:
        return not go.is_set() or flush(self)

    monkeypatch.setattr(WriterThread, "_flush", when_released)
    return go.set


def test_an_invalid_row_costs_its_batch_and_no_later_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = hold(monkeypatch)
    recorder = Recorder(tmp_path, name="test")
    recorder.log_step({"train/loss": 1.0})
    recorder._writer.put(INVALID)
    recorder.event("mark", "lost")
    go()
    recorder._writer.wake()
    wait_until(lambda: recorder.run_json["dropped"] == 3)
    recorder.log_step({"train/loss": 2.0})
    recorder.event("mark", "stored")
    recorder.close(RunStatus.FINISHED)
    assert (texts(tmp_path), steps_and_losses(tmp_path)) == (["stored"], ([2.0], [2.0]))
    assert recorder.run_json["dropped"] == 3
    assert not (tmp_path / "rank0.ring").exists()
    assert len(caplog.records) == 1


def test_an_internal_error_is_logged_once_and_retried_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_thread, "RETRY_S", 3600.0)
    beats = []

    def stumble(_self: WriterThread, **_: object) -> None:
        beats.append(1)
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(WriterThread, "_beat", stumble)
        recorder = Recorder(tmp_path, name="test")
        wait_until(lambda: bool(beats))
        recorder.event("mark", "here")  # wakes the writer
        recorder.close(RunStatus.FINISHED)
    assert len(beats) == 2  # the pause ended by the close
    assert texts(tmp_path) == ["here"]
    errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert [message.endswith("RuntimeError: a mistake") for message in errors] == [True]


def no_thread(_self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def no_file(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [
        (threading.Thread, "start", no_thread),
        (writer_thread, "write_run_json", no_file),
        (writer_thread, "RingBuffer", no_file),
        (schema, "TABLES", "CREATE TABLE half (x); NONSENSE"),
    ],
    ids=["thread", "run.json", "ring", "store"],
)
def test_a_recorder_that_cannot_start_leaves_no_file_and_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failing: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises((OSError, StoreError), match="thread|space|cannot create"):
            Recorder(tmp_path, name="test")
    assert list(tmp_path.iterdir()) == []
    Recorder(tmp_path, name="test").close(RunStatus.FINISHED)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match="File exists"):
        Recorder(tmp_path, name="second")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
