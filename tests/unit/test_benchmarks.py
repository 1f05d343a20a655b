"""The pure parts of the benchmarks: pairing, statistics, parsing, and what counts as met."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import child, gate_truth_script, pairs


def test_a_ratio_is_to_the_line_between_the_bare_blocks_around() -> None:
    # The machine slows down by 1 s a block: bare alone would show that as a cost of the way.
    times = {"bare": (10.0, 15.0), "x": (11.0, 14.0), "y": (24.0,), "bare_again": (13.0,)}
    taken = {way: iter(values) for way, values in times.items()}
    order = ("bare", "x", "y", "bare_again", "x", "bare")
    found = pairs.ratios([(way, next(taken[way])) for way in order])
    assert found["x"] == pytest.approx([1.0, 1.0])
    assert found["y"] == pytest.approx([2.0])
    # The second bare process is compared with the first alone.
    bare = ("bare", 10.0)
    blocks = [bare, ("bare_again", 6.0), bare, ("bare_again", 5.0), bare]
    assert pairs.ratios(blocks) == {"bare_again": pytest.approx([0.6, 0.5])}
    # A block without a bare one on both sides does not count.
    assert pairs.ratios([("x", 1.0), ("bare", 1.0), ("y", 2.0)]) == {}


def test_an_interval_holds_the_median_and_narrows_with_the_values() -> None:
    few, many = pairs.interval([1.0, 2.0, 3.0]), pairs.interval([1.0, 2.0, 3.0] * 50)
    assert few["median"] == many["median"] == 2.0
    assert few["interval_95"] == [1.0, 3.0]
    assert many["interval_95"][1] - many["interval_95"][0] < 2.0
    assert pairs.interval([]) == {"median": None, "interval_95": None}


def test_a_planted_slowdown_is_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The steps last the planted factor longer, with the lateness of a wait made up for."""
    clock = [0.0]

    def late_sleep(seconds: float) -> None:
        clock[0] += seconds + 0.003

    def now() -> float:
        clock[0] += 1e-6
        return clock[0]

    monkeypatch.setattr(gate_truth_script.time, "perf_counter", now)
    monkeypatch.setattr(gate_truth_script.time, "sleep", late_sleep)
    monkeypatch.setenv(gate_truth_script.FOLDER, str(tmp_path))
    monkeypatch.setenv(gate_truth_script.DRIFT, "0.01")
    monkeypatch.setattr(gate_truth_script, "STEP_SPREAD", 0.0)
    monkeypatch.setattr(gate_truth_script, "PROCESS_SPREAD", 0.0)
    (tmp_path / "trials.jsonl").write_text("{}\n{}\n")  # two trials: a drift of 2 %
    slowdown = gate_truth_script.Slowdown(0.05, 0.04)
    for _ in range(5):
        slowdown()
        ended = clock[0]
        clock[0] += 0.002  # the host computes
    slowdown._file.close()
    step = 0.04 * 1.05 * 1.02
    assert np.fromfile(tmp_path / "steps-2") == pytest.approx([step] * 4)
    # The lateness of 2 ms of a wait (3 ms, less the last one as a loop) does not add up.
    assert ended == pytest.approx(4 * step + 0.002, abs=1e-4)


def test_a_child_returns_the_functions_result_or_the_last_line_of_its_error(tmp_path: Path) -> None:
    python = Path(sys.executable)
    found = child.call(python, pairs.order, ["x", "y"], 3, 0, home=tmp_path, timeout_s=60)
    assert found == pairs.order(["x", "y"], 3, 0)
    with pytest.raises(child.ChildError, match=r"^TypeError: .*order"):
        child.call(python, pairs.order, [], home=tmp_path, timeout_s=60)
