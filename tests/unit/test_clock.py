"""Setting the wall clock changes no time of a run, and a live run stays alive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stepscope.common.clock import Clock
from stepscope.run import RunStatus, process_identity, process_of, read_run, write_run_json
from stepscope.store import StoreReader
from stepscope.store.recorder import Recorder
from tests.support.run_values import metric

HOUR_S = 3600.0
SetClock = Callable[[float], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Change the wall clock by seconds, as `date -s` does: the boot's epoch time moves too."""
    wall, boot = time.time, psutil._pslinux.boot_time

    def set_by(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: wall() + seconds)
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot() + seconds)

    return set_by


def test_the_clock_ignores_changes_of_the_wall_clock(set_clock: SetClock) -> None:
    one = Clock()
    before = one.now()
    set_clock(-HOUR_S)
    assert before <= one.now() < before + 60.0
    one.restart()
    assert one.now() == pytest.approx(time.time(), abs=60.0)


@pytest.mark.parametrize("set_by_s", [HOUR_S, -HOUR_S])
def test_rows_and_events_have_rising_times(
    tmp_path: Path, set_clock: SetClock, set_by_s: float
) -> None:
    recorder = Recorder(tmp_path, name="digits")
    for step in range(1, 41):
        recorder.log_step({"train/loss": 1.0})
        recorder.sample({"process/rss": 1.0})
        if step == 20:
            set_clock(set_by_s)
    recorder.event("mark", "after")
    recorder.close(RunStatus.FINISHED)
    run = read_run(tmp_path)
    assert run.ended is not None
    assert 0 < metric(tmp_path, "perf/step_time").sum() <= run.ended - run.created
    with StoreReader(tmp_path) as reader:
        for series in reader.series():
            ts = reader.read(series.id, 0, series.rows, 1).ts
            assert (ts[1:] >= ts[:-1]).all()
            assert run.created <= ts[0] <= ts[-1] <= run.ended < run.created + 60.0
        (event,) = reader.events()
    assert run.created <= event.ts <= run.ended


@pytest.mark.parametrize("set_by_s", [HOUR_S, -HOUR_S])
def test_a_live_run_stays_alive(tmp_path: Path, set_clock: SetClock, set_by_s: float) -> None:
    """As a page reads it: the process that writes, here the test's parent, is another one."""
    parent = psutil.Process(os.getppid())
    identity = process_identity(parent.pid)
    set_clock(set_by_s)
    assert process_of(identity) is not None
    assert process_of(identity | {"pid_ticks": 1}) is None
    assert process_of(identity | {"pid_namespace": "of an earlier boot"}) is None
    known = {"created": time.time() - set_by_s, "status": "running"}
    write_run_json(tmp_path, identity | known | {"heartbeat": time.time()})
    os.utime(tmp_path / "run.json", (time.time(),) * 2)
    run = read_run(tmp_path)
    assert run.status is RunStatus.RUNNING
    assert run.heartbeat_age_s < 60.0
