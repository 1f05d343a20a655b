"""The clock, or the time zone, is changed while a script trains.

The script replaces `time.time` of its own process: setting the clock needs root and would change it
for the whole machine. Times of files stay those of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepscope.run import RunStatus, read_run, run_folders
from stepscope.store import StoreReader
from tests.support.run_values import block_of

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, sys, time
import stepscope
from stepscope.run import read_run

wall, tracker, called = time.time, stepscope.init("mine"), []
for step in range(60):
    if step == 30:
        time.time = lambda: wall() + float(sys.argv[1])
        os.environ["TZ"] = "Pacific/Auckland"
        time.tzset()
    time.sleep(0.05)
    before = time.perf_counter()
    tracker.step(loss=1.0)
    called.append((before, time.perf_counter()))
run = read_run(tracker.folder)
print(json.dumps({"called": called, "status": run.status, "age_s": run.heartbeat_age_s}))
"""


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0, 0.0])
def test_a_changed_clock_changes_no_time_of_a_run(tmp_path: Path, set_by_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(set_by_s)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "STEPSCOPE_RUNS": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["status"] == RunStatus.RUNNING
    assert printed["age_s"] < 10.0
    (folder,) = run_folders(tmp_path)
    run = read_run(folder)
    assert run.ended is not None
    before, after = np.array(printed["called"]).T
    assert run.ended - run.created == pytest.approx(after[-1] - before[0], abs=10.0)
    rows = block_of(folder)
    taken = rows.mean[rows.keys.index("perf/step_time")][1:]
    # A row's time lies between begin and end of its call.
    assert (taken >= 0.95 * (before[1:] - after[:-1])).all()
    assert (taken <= 1.05 * (after[1:] - before[:-1])).all()
    with StoreReader(folder) as reader:
        for info in reader.series():
            ts = reader.read(info.id, 0, info.rows, 1).ts
            for first, last in ((0, 9), (9, info.rows - 2), (info.rows - 9, info.rows - 1)):
                found = reader.rows_between(info.id, "time", ts[first], ts[last])
                assert found == (first, last + 1)
        events = [event.data["set_by_s"] for event in reader.events() if event.kind == "clock_set"]
    assert events == ([pytest.approx(set_by_s, abs=1.0)] if set_by_s else [])
