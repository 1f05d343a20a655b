"""The recorder over real threads, processes, disks and signals."""

from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from stepscope.run import RunStatus, read_run
from stepscope.store import STORE_NAME, StoreReader, writer_thread
from stepscope.store.blocks import STEP_TIME, STEPS
from stepscope.store.reader import send_command
from stepscope.store.recorder import Command, CommandName, Recorder
from stepscope.store.writer_thread import BALLAST
from tests.support.child_process import child
from tests.support.run_values import metric, steps_of
from tests.support.waiting import wait_until


def test_rows_events_and_status_reach_the_folder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test", config={"seed": 3, "out": tmp_path})
    recorder.set_status(RunStatus.RUNNING)
    for step in range(1, 101):
        recorder.log(step, {"train/loss": 1 / step, "val/loss": None})
    for nothing in ({}, {"val/loss": None}):
        recorder.log(100, nothing)
    recorder.sample({"process/rss": 0.0})
    recorder.sample({"gpu/util": 0.0}, "GPU-x")
    recorder.epoch = 2
    recorder.event("mark", "half way", before={"a": 1})
    recorder.close(RunStatus.FINISHED)
    recorder.close(RunStatus.FAILED)  # the first status counts

    run = read_run(tmp_path)
    assert (run.status, run.run_json["config"]) == (
        RunStatus.FINISHED,
        {"seed": 3, "out": str(tmp_path)},
    )
    assert run.run_json["step"] == 100
    assert not (tmp_path / BALLAST).exists()
    with StoreReader(tmp_path) as reader:
        rows = {(info.stream, info.source): info.rows for info in reader.series()}
        (event,) = reader.events()
    assert rows == {("steps", ""): 100, ("samples", ""): 1, ("devices", "GPU-x"): 1}
    assert (event.step, event.epoch, event.text) == (100, 2, "half way")
    assert event.data == {"before": {"a": 1}}


def test_commands_wake_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLUSH_S", "HEARTBEAT_S"):
        monkeypatch.setattr(writer_thread, name, 60.0)
    recorder = Recorder(tmp_path, name="test")
    assert recorder.commands.take() is None
    for text in ("first", "second"):
        time.sleep(0.1)  # the writer sleeps
        sent = child(
            "from pathlib import Path; from stepscope.store.reader import send_command;"
            f"print(send_command(Path({str(tmp_path)!r}), 'mark', {{'text': {text!r}}}))"
        )
        recorder.commands.wait(10)
        command = recorder.commands.take()
        assert command is not None
        assert (command.id, command.name) == (int(sent), CommandName.MARK)
        assert command.args == {"text": text}
    recorder.finish(command, "marked", after={"a": 2})
    recorder.close(RunStatus.STOPPED)
    with StoreReader(tmp_path) as reader:
        (event,) = reader.events()
    assert event.data == {"ok": True, "command_id": command.id, "after": {"a": 2}}


def test_commands_that_no_run_knows_are_passed_over(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test")
    send_command(tmp_path, "format_disk", {})
    with closing(sqlite3.connect(tmp_path / STORE_NAME)) as connection, connection:
        deep = "INSERT INTO commands (asked_ts, name, args) VALUES (0.0, 'mark', ?)"
        connection.execute(deep, ("[" * 100_000,))
    for name in ("pause", "save_checkpoint"):
        send_command(tmp_path, name, {})
    wait_until(lambda: len(recorder.commands.waiting) == 2)
    done, failed = recorder.commands.take(), recorder.commands.take()
    assert done is not None
    assert failed is not None
    recorder.finish(done, "Paused")
    recorder.finish(failed, "full", ok=False)
    recorder.close(RunStatus.STOPPED)
    with StoreReader(tmp_path) as reader:
        events = [(event.kind, event.text, event.data["ok"]) for event in reader.events()]
    assert events == [("pause", "Paused", True), ("save_checkpoint", "full", False)]


def test_two_writers_and_three_readers_never_wait_for_a_lock(tmp_path: Path) -> None:
    """The training process and a page both write to one store while three tabs read it."""
    recorder = Recorder(tmp_path, name="test")
    done = threading.Event()

    def read() -> int:
        count = 0
        while not done.is_set():
            with StoreReader(tmp_path) as reader:
                for info in reader.series():
                    reader.read(info.id, 0, info.rows, 16)
                reader.events()
            count += 1
        return count

    def command() -> int:
        count = 0
        while not done.wait(0.002):
            send_command(tmp_path, "mark", {"text": "x"})
            count += 1
        return count

    taken = step = 0
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(work) for work in (read, read, read, command)]
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            for _ in range(200):
                step += 1
                recorder.log(step, {"train/loss": 1.0, "train/lr": 0.1})
            while (got := recorder.commands.take()) is not None:
                recorder.finish(got, "ok")
                taken += 1
            time.sleep(0.01)
        done.set()
    recorder.close(RunStatus.FINISHED)
    *reads, sent = (other.result() for other in others)  # raises what one has raised
    assert min(sum(reads), sent, taken) > 20
    assert recorder.run_json["dropped"] == 0
    assert read_run(tmp_path).run_json["problem"] is None
    assert steps_of(tmp_path) == step


def test_a_step_with_more_to_do_than_its_row_is_not_recorded_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test")
    layout = recorder.ring.layout((*STEPS, STEP_TIME, "train/loss"))
    assert layout is not None
    try:
        assert recorder.record(layout, [1.0])
        recorder.log_step({"train/loss": 2.0})
        recorder.commands.offer(Command(1, CommandName.MARK, {}))
        assert not recorder.record(layout, [3.0]), "a command waits"
        assert recorder.commands.take() == Command(1, CommandName.MARK, {})
        recorder.log_step({"train/loss": 3.0})
        assert recorder.record(layout, [4.0])
        recorder.request_boundary()
        recorder.log(4, {"val/loss": 4.0})
        assert not recorder.record(layout, [5.0]), "the sampler needs the step"
        recorder.log_step({"train/loss": 5.0})
        assert recorder.record(layout, [6.0])
    finally:
        recorder.close(RunStatus.FINISHED)
    recorder.log_step({"train/loss": 7.0})
    assert not recorder.record(layout, [8.0])
    assert metric(tmp_path, "train/loss").tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
