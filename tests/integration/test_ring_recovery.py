"""The ring over real processes: `kill -9` loses no step; threads and forks do no harm."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepscope.run import RunStatus, read_run
from stepscope.store import STORE_NAME, StoreReader, StoreWriter
from stepscope.store.recorder import Recorder
from stepscope.store.ring import RingBuffer
from stepscope.store.writer import recover, recover_ended
from tests.support.child_process import ROOT, run_python
from tests.support.run_folders import killed_run, make_run
from tests.support.run_values import block_of, steps_and_losses


def test_kill_9_loses_no_step(tmp_path: Path) -> None:
    last = killed_run(tmp_path)
    run = read_run(tmp_path)
    assert run.status is RunStatus.CRASHED
    assert recover_ended(run) > 0
    numbers, losses = steps_and_losses(tmp_path)
    assert numbers[-1] >= last
    assert numbers == list(range(1, len(numbers) + 1)), "none lost, none twice"
    assert losses == [number / 2 for number in numbers]
    assert not (tmp_path / "rank0.ring").exists()
    assert recover_ended(read_run(tmp_path)) == 0
    with StoreReader(tmp_path) as reader:  # its rollups are those of its rows
        (info,) = (info for info in reader.series() if info.stream == "steps")
        buckets = reader.read(info.id, 0, info.rows, 256)
    line = buckets.keys.index("train/loss")
    groups = [losses[start : start + 256] for start in range(0, len(losses), 256)]
    assert buckets.count[line].tolist() == list(map(len, groups))
    assert np.allclose(buckets.mean[line], list(map(np.mean, groups)))
    assert buckets.high[line].tolist() == list(map(max, groups))


TIMED_VICTIM = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from stepscope.common import files
from stepscope.store.recorder import Recorder
from stepscope.run import RunStatus
shared = SimpleNamespace(mountpoint="/", fstype="nfs4")
files.psutil.disk_partitions = lambda all: [shared]
recorder = Recorder(Path(sys.argv[1]), name="victim")
recorder.set_status(RunStatus.RUNNING)
step = 0
while True:
    step += 1
    recorder.log(step, {"train/loss": step / 2})
    os.write(1, b"%d %f\\n" % (step, time.monotonic()))
    time.sleep(0.002)
"""


def test_kill_9_loses_half_a_second_at_most_on_a_shared_disk(tmp_path: Path) -> None:
    disk = tmp_path / "a disk"
    disk.mkdir()
    command = [sys.executable, "-c", TIMED_VICTIM, str(disk)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = [child.stdout.readline() for _ in range(300)]
    names = {path.name for path in disk.iterdir()}
    assert names.isdisjoint({"rank0.ring", "rank0.sqlite-wal"})
    child.kill()
    printed += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    times = [float(line.split()[1]) for line in printed if line.endswith("\n")]
    recover_ended(read_run(disk))
    assert not (disk / "rank0.sqlite-journal").exists()
    numbers, _ = steps_and_losses(disk)
    assert numbers == list(range(1, len(numbers) + 1)), "none lost in between, none twice"
    # A busy machine delays the writer as it does the loop.
    delay_s = max(later - before for before, later in itertools.pairwise(times))
    assert times[-1] - times[len(numbers) - 1] <= 0.5 + delay_s


def test_a_broken_loss_and_a_sample_in_the_last_rows_are_stored(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "killed", pid=2**22 + 1)
    StoreWriter(folder / STORE_NAME).close()
    ring = RingBuffer(tmp_path / "rank0.ring")
    layout = ring.layout(("steps", "", "train/loss"))
    assert layout is not None
    for step in range(1, 11):
        ring.put(layout, float(step), step, float("nan") if step > 4 else 1.0)
    of_gpu = ring.layout(("devices", "GPU-a", "gpu/util"))
    assert of_gpu is not None
    ring.put(of_gpu, 10.0, 10, 50.0)
    shutil.copy(tmp_path / "rank0.ring", folder)  # as a killed process leaves it
    ring.delete()
    assert recover(folder) == 10
    with StoreReader(folder) as reader:
        (event,) = reader.events()
        gpu = reader.find("devices", "GPU-a")
        assert reader.read(gpu.id, 0, gpu.rows, 1).mean.tolist() == [[50.0]]
        assert not reader.find("samples").rows
    assert (event.kind, event.step, event.ts) == ("nan", 5, 5.0)
    assert "nan" in event.text


def test_live_and_damaged_rings_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, name="test")
    recorder.set_status(RunStatus.RUNNING)
    recorder.log(1, {"train/loss": 1.0})
    assert recover(tmp_path) == recover_ended(read_run(tmp_path)) == 0
    recorder.close(RunStatus.FINISHED)
    assert steps_and_losses(tmp_path) == ([1.0], [1.0])
    killed = make_run(tmp_path / "killed", pid=2**22 + 1)
    (killed / "rank0.ring").write_bytes(b"not a ring")
    for _ in range(3):
        assert recover_ended(read_run(killed)) == 0
    assert len(caplog.records) == 1
    assert (killed / "rank0.ring").exists()


FORKING = """
import os, sys
from pathlib import Path
from stepscope.store.recorder import Recorder
from stepscope.run import RunStatus
recorder = Recorder(Path(sys.argv[1]), name="parent")
recorder.set_status(RunStatus.RUNNING)
recorder.log(1, {"train/loss": 1.0})
if os.fork() == 0:
    for step in range(2, 500):
        recorder.log(step, {"train/loss": -1.0, f"child/{step}": 0.0})
    recorder.event("child", "must not be seen")
    recorder.describe(child=True)
    recorder.close(RunStatus.FAILED, "the child")
    sys.exit(0)
os.wait()
recorder.log(2, {"train/loss": 2.0})
recorder.close(RunStatus.FINISHED)
"""


def test_a_forked_child_records_nothing_and_does_no_harm(tmp_path: Path) -> None:
    assert run_python("-c", FORKING, str(tmp_path)).returncode == 0
    run = read_run(tmp_path)
    assert run.status is RunStatus.FINISHED
    assert "child" not in run.run_json
    assert steps_and_losses(tmp_path) == ([1.0, 2.0], [1.0, 2.0])
    with StoreReader(tmp_path) as reader:
        assert reader.events() == []


def test_wide_rows_and_ever_new_names_are_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, name="test")
    wide = {f"wide/{i}": float(i) for i in range(40)}
    recorder.log(1, wide)
    for step in range(2, 1500):
        recorder.log(step, {"train/loss": 1.0, f"a/{step % 40}": 2.0, f"b/{step % 41}": 3.0})
    recorder.close(RunStatus.FINISHED)
    assert recorder.run_json["dropped"] == 0
    block = block_of(tmp_path)
    assert block.step.tolist() == [float(step) for step in range(1, 1500)]
    first = {key: block.mean[row][0] for row, key in enumerate(block.keys) if "wide" in key}
    assert first == wide
    assert (~np.isnan(block.mean[:, 1:])).sum() == 1498 * 3
    custom = read_run(tmp_path).run_json["custom"]
    assert len(custom) == 64
    assert "train/loss" not in custom


@pytest.mark.parametrize("queued", [False, True])
def test_a_thread_interrupted_in_a_step_costs_that_step_only(tmp_path: Path, queued: bool) -> None:
    recorder = Recorder(tmp_path, name="test")
    recorder.log(1, {"train/loss": 1.0})
    recorder.ring.claim()  # Ctrl-C came between claiming the slot and writing it
    for step in range(3, 100):
        recorder.log(step, {"train/loss": 1.0})
    if queued:
        recorder.event("mark", "on the way out")
    recorder.close(RunStatus.STOPPED)
    assert steps_and_losses(tmp_path)[0] == [1.0, *map(float, range(3, 100))]
    assert recorder.run_json["dropped"] == 1
    assert not (tmp_path / "rank0.ring").exists()
