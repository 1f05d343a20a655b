"""Profiles for real: of a run of ours, of watched scripts, and what is in their files."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.profiling.phase_ranges import PHASES
from stepscope.profiling.summary import ProfileSummary, parse
from stepscope.run import RunStatus, read_run, run_folders
from stepscope.store import EventRow
from stepscope.store.reader import send_command
from tests.support.run_values import answer_to, ask
from tests.support.training_runs import background
from tests.support.waiting import wait_for
from trainer.config import Workload, defaults

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
PATIENCE_S = 60.0


def checked_trace(folder: Path, event: EventRow) -> list[dict[str, Any]]:
    """Return the events of the trace, after a look at the form that Perfetto reads."""
    packed = (folder / event.data["path"]).read_bytes()
    assert len(packed) == event.data["bytes"]
    content = json.loads(gzip.decompress(packed))
    events: list[dict[str, Any]] = content["traceEvents"]
    assert content["displayTimeUnit"] == "ms"
    kinds = Counter(e["ph"] for e in events)
    assert kinds["X"] > 100
    assert set(kinds) <= set("XiMsfCBEb")
    for e in events:
        assert {"pid", "tid", "ts", "name"} <= e.keys(), e
        assert "dur" in e or e["ph"] != "X", e
    return events


def summary_of(folder: Path, event: EventRow) -> ProfileSummary:
    return parse((folder / event.data["summary"]).read_bytes())


@contextmanager
def watched(runs: Path) -> Iterator[Path]:
    """Watch the script and return its folder; Stop ends it as Ctrl-C does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope.watch", "profiled.py"],
        cwd=SCRIPTS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "STEPSCOPE_RUNS": str(runs)},
    )
    try:
        folder: Path = wait_for(lambda: next(run_folders(runs), None), PATIENCE_S)
        wait_for(lambda: read_run(folder).status is RunStatus.RUNNING, PATIENCE_S)
        yield folder
        ask(folder, "stop")
        errors = process.communicate(timeout=60)[1]
        assert process.returncode in (0, 1, -2, 130), errors.decode()  # no crash
    finally:
        process.kill()
        process.wait()


def test_a_run_of_ours(tmp_path: Path) -> None:
    config = replace(defaults(Workload.DIGITS_CNN), epochs=10_000, num_threads=1)
    with background(config, tmp_path):
        wait_for(lambda: read_run(tmp_path).run_json["step"] > 5, PATIENCE_S)
        event = ask(tmp_path, "profile", steps=4)
    assert event.data["ok"], event.text
    first = event.data["first"]
    assert event.data["last"] == first + 3
    events = checked_trace(tmp_path, event)
    ranges = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    for phase in PHASES:
        assert ranges[phase] == 4, phase
    summary = summary_of(tmp_path, event)
    assert (summary.first, summary.last, summary.cuda) == (first, first + 3, False)
    calls = {operator.name: operator.calls for operator in summary.operators}
    assert calls["aten::convolution_backward"] == 2 * 4
    assert {phase: calls[phase] for phase in PHASES} == dict.fromkeys(PHASES, 4)
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".profile")]
    assert left == []


def test_a_watched_script(tmp_path: Path) -> None:
    with watched(tmp_path) as folder:
        event = ask(folder, "profile", steps=5)
        second = ask(folder, "profile", steps=1)
        during = send_command(folder, "profile", {"steps": 50})
    assert event.data["ok"], event.text
    assert second.data["ok"], second.text
    events = checked_trace(folder, event)
    summary = summary_of(folder, event)
    calls = {operator.name: operator.calls for operator in summary.operators}
    assert calls["aten::addmm"] == 2 * 5
    assert any(name.startswith("Optimizer.step#") for name in calls)
    ranges = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    assert (ranges["backward"], ranges["data"] >= 5) == (5, True)
    assert read_run(folder).status is RunStatus.STOPPED
    assert answer_to(folder, during).text.startswith("Profile: ")
