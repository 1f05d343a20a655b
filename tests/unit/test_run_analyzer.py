"""An analysis of a run's files beside the polls of its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dashboard.run_analyzer import EVERY_S, REST, RunAnalyzer
from stepscope.run import RunInfo, RunStatus
from tests.support.fake_nvml import FakeClock


def test_a_poll_waits_for_no_analysis(tmp_path: Path) -> None:
    """An analysis of the files of some hundred ranks takes longer than a poll may."""
    clock = FakeClock(now=0.0)

    def slow(run: RunInfo) -> str:
        clock.now += 1.0
        return "found"

    aside: list[Callable[[], None]] = []
    analyzer = RunAnalyzer(slow, "", clock, aside.append)
    run = RunInfo(tmp_path, RunStatus.RUNNING, None, 0.0, {"world_size": 2})
    for _ in range(2):
        assert analyzer.of(run) is None
    [analyze] = aside
    analyze()
    clock.now += REST - 1
    assert analyzer.of(run) == "found"
    assert len(aside) == 1, "an analysis that took a second is not repeated soon"
    clock.now += 1
    analyzer.of(run)
    assert len(aside) == 2


def test_a_folder_that_cannot_be_analyzed_costs_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: RunInfo) -> str:
        if clock.now < 3 * EVERY_S:
            raise OverflowError("nobody has thought of it")
        return "found"

    clock = FakeClock(now=0.0)
    analyzer = RunAnalyzer(fail, "it cannot be said", clock, lambda analyze: analyze())
    run = RunInfo(tmp_path, RunStatus.RUNNING, None, 0.0, {"world_size": 2})
    for second in range(4):
        clock.now = second * EVERY_S
        assert analyzer.of(run) == ("found" if second == 3 else None)
    assert caplog.text.count("cannot be said") == 1
