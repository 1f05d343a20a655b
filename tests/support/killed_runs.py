"""Runs whose process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.run import RunStatus, read_run, run_folders
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

VICTIM = """
import os, sys, time
from pathlib import Path
from stepscope.store.recorder import Recorder
from stepscope.run import RunStatus
recorder = Recorder(Path(sys.argv[1]), name="victim")
recorder.set_status(RunStatus.RUNNING)
step = 0
while True:
    step += 1
    recorder.log(step, {"train/loss": step / 2, "train/lr": 0.1})
    if step % 50 == 0:
        os.write(1, b"%d\\n" % step)
        time.sleep(0.001)  # a ring that is full before a late kill would drop rows
"""


def killed_run(folder: Path, lines: int = 400) -> int:
    """Kill a process that records 50 steps a millisecond; return the last step that it printed."""
    child = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    told = [child.stdout.readline() for _ in range(lines)]
    child.send_signal(signal.SIGKILL)
    told += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    return int([line for line in told if line.endswith("\n")][-1])


TRAINS = """
import sys, time, stepscope
rec = stepscope.init("victim", runs=sys.argv[1], sample=False)
while True:
    rec.step(loss=1.0)
    time.sleep(0.01)
"""


@contextmanager
def killed(tmp_path: Path) -> Iterator[Path]:
    """A run whose process was killed while it trained."""
    (tmp_path / "train.py").write_text(TRAINS)
    runs = tmp_path / "runs"
    script = subprocess.Popen(
        [sys.executable, "train.py", str(runs)],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(lambda: any(run_folders(runs)), 30)
    (folder,) = run_folders(runs)
    wait_until(lambda: read_run(folder).status is RunStatus.RUNNING, 30)
    script.send_signal(signal.SIGKILL)
    script.wait()
    yield folder
