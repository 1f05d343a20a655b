"""A full disk: at the start, during a run, and at its end. A small tmpfs is the disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.run import RunStatus, read_run, run_folders
from stepscope.store.recorder import Recorder
from stepscope.store.ring import FILE_BYTES
from stepscope.store.writer import recover_ended
from stepscope.store.writer_thread import BALLAST
from tests.support.child_process import run_python
from tests.support.run_values import steps_of
from tests.support.waiting import wait_until

SCRIPT = """
import os, sys, time
import stepscope
run = stepscope.init("full", sample=False)
run.step(loss=0.5)
while run.folder and not os.path.exists(run.folder / "rank0.sqlite-wal"):
    time.sleep(0.01)
if run.folder:
    with open(sys.argv[1], "wb", buffering=0) as hog:
        try:
            while hog.write(bytes(4096)):
                pass
        except OSError:
            pass
for step in range(3199):
    run.step(loss=1 / (step + 1))
sys.exit(int(sys.argv[2]))
"""
BY_INIT: list[str] = []
BY_WATCH = ["-m", "stepscope.watch"]

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount a file system of this many KiB; return its folder."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip("this sandbox does not allow mounts")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk; return the file that does."""
    hog = disk / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return hog


def run_script(runs: Path, command: list[str], code: int) -> subprocess.CompletedProcess[str]:
    script = runs.parent / "script.py"
    if not script.exists():
        script.write_text(SCRIPT)
    words = [*command, str(script), str(runs / "hog"), str(code)]
    return run_python(*words, STEPSCOPE_RUNS=str(runs))


@pytest.mark.parametrize(
    ("command", "code", "status"),
    [
        (BY_INIT, 0, RunStatus.FINISHED),
        (BY_WATCH, 0, RunStatus.FINISHED),
        (BY_WATCH, 3, RunStatus.FAILED),
    ],
    ids=["init", "watch", "watch-fails"],
)
def test_the_end_of_a_script_and_the_lost_rows_are_recorded(
    disk: Disk, command: list[str], code: int, status: RunStatus
) -> None:
    runs = disk(600)
    done = run_script(runs, command, code)
    (folder,) = run_folders(runs)
    run = read_run(folder)
    assert (done.returncode, run.status) == (code, status)
    stored, dropped = steps_of(folder), run.run_json["dropped"]
    assert run.run_json["step"] == 3200
    if dropped:
        assert "full" in run.run_json["dropped_reason"]
        assert f"{dropped} rows and events are lost" in done.stderr
        assert stored + dropped >= 3200
    else:
        assert stored == 3200
        assert run.run_json.get("dropped_reason") is None
    assert run.run_json["problem"] is None
    assert not (folder / BALLAST).exists()


def test_rows_of_a_mapped_ring_are_stored_when_there_is_space(disk: Disk) -> None:
    folder = disk(FILE_BYTES // 1024 + 6000) / "run"
    folder.mkdir()
    recorder = Recorder(folder, name="test")
    assert recorder.ring.reason is None
    recorder.log(1, {"train/loss": 1.0})
    wait_until(lambda: steps_of(folder) == 1)
    hog = fill(folder.parent)
    for step in range(2, 60_002):
        recorder.log(step, {f"train/loss{step % 7}": hash((step, "x")) / 7.0})
    recorder.close(RunStatus.FINISHED)
    run = read_run(folder)
    assert (run.status, run.run_json["dropped"]) == (RunStatus.FINISHED, 0)
    assert steps_of(folder) < 60_001
    assert run.run_json["problem"] is not None
    hog.unlink()
    missing = 60_001 - steps_of(folder)
    assert recover_ended(run) == missing
    assert steps_of(folder) == 60_001
    assert read_run(folder).run_json["problem"] is None


def test_a_full_disk_delays_rows_until_there_is_space(disk: Disk) -> None:
    folder = disk(3000)
    recorder = Recorder(folder, name="test")
    recorder.set_status(RunStatus.RUNNING)
    recorder.log(1, {"train/loss": 1.0})
    wait_until(lambda: steps_of(folder) == 1)
    hog = fill(folder)
    for step in range(2, 20_002):
        recorder.log(step, {"train/loss": float(hash(step) % 9973)})
    wait_until(lambda: read_run(folder).run_json["problem"] is not None)
    assert read_run(folder).status is RunStatus.RUNNING
    hog.unlink()
    wait_until(lambda: read_run(folder).run_json["problem"] is None)
    recorder.close(RunStatus.FINISHED)
    assert steps_of(folder) == 20_001
    assert recorder.run_json["dropped"] == 0


@pytest.mark.parametrize(("command", "sentences"), [(BY_INIT, 1), (BY_WATCH, 2)])
def test_a_disk_that_is_full_at_the_start_leaves_no_folder(
    disk: Disk, command: list[str], sentences: int
) -> None:
    """Under `stepscope watch` both it and the script's `init` fail."""
    runs = disk(300)
    hog = fill(runs)
    with hog.open("r+b") as file:
        file.truncate(200 * 1024)
    done = run_script(runs, command, 3)
    assert done.returncode == 3
    assert list(runs.iterdir()) == [hog]
    assert len(done.stderr.splitlines()) == sentences
