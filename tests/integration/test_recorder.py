"""The recorder over real threads, processes, disks and signals."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.recorder import writer_thread
from stepscope.recorder.recorder import CommandName, Recorder
from stepscope.recorder.writer_thread import BALLAST
from stepscope.run import RunStatus, read_run
from stepscope.store import STORE_NAME, StoreReader
from stepscope.store.reader import send_command
from tests.support.waiting import wait_for, wait_until

ROOT = Path(__file__).resolve().parents[2]


def step_rows(folder: Path) -> int:
    with StoreReader(folder) as reader:
        return sum(info.rows for info in reader.series() if info.stream == "steps")


def test_rows_events_and_status_reach_the_folder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test", config={"seed": 3})
    recorder.set_status(RunStatus.RUNNING)
    for step in range(1, 101):
        recorder.log(step, {"train/loss": 1 / step, "val/loss": None})
    for nothing in ({}, {"val/loss": None}):
        recorder.log(100, nothing)
    recorder.sample({"process/rss": 0.0})
    recorder.device("GPU-x", {"gpu/util": 0.0})
    recorder.epoch = 2
    recorder.event("mark", "half way", before={"a": 1})
    recorder.close(RunStatus.FINISHED)
    recorder.close(RunStatus.FAILED)  # the first one counts

    run = read_run(tmp_path)
    assert run.status is RunStatus.FINISHED
    assert run.run_json["config"] == {"seed": 3}
    assert run.run_json["step"] == 100
    assert not (tmp_path / BALLAST).exists()
    with StoreReader(tmp_path) as reader:
        rows = {(info.stream, info.source): info.rows for info in reader.series()}
        (event,) = reader.events()
    assert rows == {("steps", ""): 100, ("samples", ""): 1, ("devices", "GPU-x"): 1}
    assert (event.step, event.epoch, event.text) == (100, 2, "half way")
    assert event.data == {"before": {"a": 1}}


def test_a_command_of_another_process_arrives_and_is_acknowledged(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test")
    assert recorder.commands.take() == []
    asked = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from stepscope.store.reader import send_command;"
            "print(send_command(Path(sys.argv[1]), 'mark', {'text': 'hello'}))",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (command,) = recorder.commands.wait(5)
    assert (command.id, command.name) == (int(asked.stdout), CommandName.MARK)
    assert command.args == {"text": "hello"}
    recorder.finish(command, "marked", after={"a": 2})
    recorder.close(RunStatus.STOPPED)
    with StoreReader(tmp_path) as reader:
        (event,) = reader.events()
    assert event.data == {"ok": True, "command_id": command.id, "after": {"a": 2}}


def test_a_command_wakes_the_writer_which_does_not_look_for_one_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLUSH_S", "HEARTBEAT_S", "COMMAND_POLL_S"):
        monkeypatch.setattr(writer_thread, name, 60.0)
    recorder = Recorder(tmp_path, name="test")
    for text in ("first", "second"):
        time.sleep(0.1)  # the writer sleeps
        send_command(tmp_path, CommandName.MARK, {"text": text})
        (command,) = recorder.commands.wait(10)
        assert command.args == {"text": text}
    recorder.close(RunStatus.FINISHED)


def test_a_foreign_command_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test")
    send_command(tmp_path, "format_disk", {})
    with sqlite3.connect(tmp_path / STORE_NAME) as connection:
        deep = "INSERT INTO commands (asked_ts, name, args) VALUES (0.0, 'mark', ?)"
        connection.execute(deep, ("[" * 100_000,))
    connection.close()
    good = send_command(tmp_path, "pause", {})
    assert [c.id for c in recorder.commands.wait(5)] == [good]
    recorder.close(RunStatus.STOPPED)


WRITER = """
import sys, time
from pathlib import Path
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunStatus
recorder = Recorder(Path(sys.argv[1]), name="victim")
recorder.set_status(RunStatus.RUNNING)
step = 0
while True:
    step += 1
    recorder.log(step, {"train/loss": 1.0})
    print(step, time.time(), flush=True)
    time.sleep(0.001)
"""


def test_how_a_command_ended_is_in_the_store(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test")
    send_command(tmp_path, "format_disk", {})
    send_command(tmp_path, "pause", {})
    send_command(tmp_path, "save_checkpoint", {})
    asked = recorder.commands.wait(5)
    while len(asked) < 2:
        asked += recorder.commands.wait(5)
    done, failed = asked
    recorder.finish(done, "Paused")
    recorder.finish(failed, "Save checkpoint: the disk is full", ok=False)
    recorder.close(RunStatus.STOPPED)
    connection = sqlite3.connect(tmp_path / STORE_NAME)
    rows = connection.execute("SELECT name, state, result FROM commands ORDER BY id").fetchall()
    connection.close()
    assert rows[0][:2] == ("format_disk", "refused")
    assert "not a command" in rows[0][2]
    assert rows[1:] == [
        ("pause", "done", "Paused"),
        ("save_checkpoint", "refused", "Save checkpoint: the disk is full"),
    ]


def test_nothing_changes_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thread's run is cut off, it may leave a pause while another thread writes its end."""
    recorder = Recorder(tmp_path, name="test")
    recorder.describe(epochs=3)
    close = recorder._writer.close

    def leave_pause(timeout_s: float) -> None:
        recorder.set_status(RunStatus.RUNNING)
        recorder.describe(epochs=4)
        close(timeout_s)

    monkeypatch.setattr(recorder._writer, "close", leave_pause)
    recorder.close(RunStatus.STOPPED, "cut off")
    ended = read_run(tmp_path)
    assert (ended.status, ended.reason) == (RunStatus.STOPPED, "cut off")
    assert ended.run_json["epochs"] == 3


@pytest.mark.alone
def test_kill_9_loses_less_than_a_second_and_reads_as_crashed(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    logged = [child.stdout.readline() for _ in range(1200)]
    os.kill(child.pid, signal.SIGKILL)
    logged += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    times = {int(line.split()[0]): float(line.split()[1]) for line in logged if line.endswith("\n")}
    assert read_run(tmp_path).status is RunStatus.CRASHED
    kept = step_rows(tmp_path)
    lost_s = times[max(times)] - times[kept] if kept < max(times) else 0.0
    assert kept > 0
    assert lost_s <= 1.0


def test_two_writers_and_three_readers_never_meet_a_lock(tmp_path: Path) -> None:
    """The training process and a page both write to one store while three tabs read it."""
    recorder = Recorder(tmp_path, name="test")
    errors: list[BaseException] = []
    done = threading.Event()
    counted = [0, 0]

    def guard(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not done.is_set():
                    work()
            except Exception as error:  # noqa: BLE001 - the test asserts that there are none
                errors.append(error)

        return run

    def read() -> None:
        with StoreReader(tmp_path) as reader:
            for info in reader.series():
                reader.read(info.id, 0, info.rows, 16)
            reader.events()
        counted[0] += 1

    def command() -> None:
        send_command(tmp_path, "mark", {"text": "x"})
        counted[1] += 1
        time.sleep(0.002)

    threads = [threading.Thread(target=guard(work)) for work in (read, read, read, command)]
    for thread in threads:
        thread.start()
    taken = 0
    deadline = time.monotonic() + 3
    step = 0
    while time.monotonic() < deadline:
        for _ in range(200):
            step += 1
            recorder.log(step, {"train/loss": 1.0, "train/lr": 0.1})
        for got in recorder.commands.take():
            recorder.finish(got, "ok")
            taken += 1
        time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    recorder.close(RunStatus.FINISHED)
    assert errors == []
    assert min(counted) > 20
    assert taken > 20
    assert recorder.dropped == 0
    assert read_run(tmp_path).run_json["problem"] is None
    assert step_rows(tmp_path) == step


def test_a_full_disk_holds_rows_says_so_and_recovers(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this sandbox does not allow mounts")
    try:
        recorder = Recorder(tmp_path, name="test")
        recorder.set_status(RunStatus.RUNNING)
        recorder.log(1, {"train/loss": 1.0})
        wait_until(lambda: step_rows(tmp_path) == 1)
        hog = tmp_path / "hog"
        with pytest.raises(OSError, match="space"):
            hog.write_bytes(b"\0" * 6_000_000)
        for step in range(2, 20_002):
            recorder.log(step, {"train/loss": float(hash(step) % 9973)})
        wait_until(lambda: read_run(tmp_path).run_json["problem"] is not None)
        run = read_run(tmp_path)
        assert "free disk space" in run.run_json["problem"]
        assert run.status is RunStatus.RUNNING
        hog.unlink()
        wait_until(lambda: read_run(tmp_path).run_json["problem"] is None, 20)
        recorder.close(RunStatus.FINISHED)
        assert step_rows(tmp_path) == 20_001
        assert recorder.dropped == 0
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_the_writer_may_begin_before_the_recorder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def begin_and_let_it_run(self: threading.Thread) -> None:
        start(self)
        if self.name == "stepscope-writer":
            written = (tmp_path / "run.json").stat().st_mtime_ns
            wait_for(lambda: (tmp_path / "run.json").stat().st_mtime_ns > written, 5)

    monkeypatch.setattr(threading.Thread, "start", begin_and_let_it_run)
    Recorder(tmp_path, name="slow").close(RunStatus.FINISHED)
    assert not caplog.records
