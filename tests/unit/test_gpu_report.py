"""The GPU report: order and time limits of its steps, kept results, and its document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_report as report
from benchmarks.gpu_report import FAILED, FINISHED, NOT_STARTED, Step

KEYS = ["date", "commit", "simulated", "gpus", "driver", "torch", "cuda", "python", "cores"]
VALUES = ("2026-01-02", "abc", False, ["NVIDIA X"], "1.2", "2.11.0", "13.0", "3.12.3", 16)
RUN = dict(zip(KEYS, VALUES, strict=True))
PLAN = {"one": [Step("a", 10, []), Step("b", 10, [])], "two": [Step("c", 10, [])]}


def ran(status: str, **more: Any) -> dict[str, Any]:
    return {"status": status, "reason": None, "seconds": 1.0, "result": {}, "run": RUN} | more


def run_all(
    monkeypatch: pytest.MonkeyPatch, out: Path, minutes: float, statuses: dict[str, str]
) -> list[str]:
    """Run PLAN with fake steps of their whole `takes_s` each; return those that were started."""
    clock, started = [0.0], []

    def run_step(step: Step, _: Path, limit: float) -> dict[str, Any]:
        if step.name == "facts":
            return ran(FINISHED, result={**RUN})
        started.append(step.name)
        clock[0] += min(step.takes_s, limit)
        return ran(statuses.get(step.name, FINISHED))

    monkeypatch.setattr(report, "parts", lambda short: PLAN)
    monkeypatch.setattr(report, "run_step", run_step)
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    report.measure(out, minutes, "abc")
    return started


def test_a_second_call_runs_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    budget = (25 + report.GRACE_S) / 60
    assert run_all(monkeypatch, tmp_path, budget, {"a": FAILED}) == ["a", "b"]
    first = json.loads((tmp_path / "two.json").read_text())
    assert first["status"] == NOT_STARTED
    assert first["steps"]["c"]["reason"]
    assert run_all(monkeypatch, tmp_path, budget, {}) == ["c", "a"]
    assert run_all(monkeypatch, tmp_path, budget, {}) == []
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {part: one["status"] for part, one in found.items()} == {
        "one": FINISHED,
        "two": FINISHED,
    }
    assert found["one"]["steps"]["a"]["runs"] == 2
