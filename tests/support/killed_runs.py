"""Runs whose process was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.child_process import ROOT

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
