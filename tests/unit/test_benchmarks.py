"""The pure parts of the benchmarks: pairing, statistics, parsing, and what counts as met."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import child, pairs


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


def test_a_child_returns_the_functions_result_or_the_last_line_of_its_error(tmp_path: Path) -> None:
    python = Path(sys.executable)
    found = child.call(python, pairs.order, ["x", "y"], 3, 0, home=tmp_path, timeout_s=60)
    assert found == pairs.order(["x", "y"], 3, 0)
    with pytest.raises(child.ChildError, match=r"^TypeError: .*order"):
        child.call(python, pairs.order, [], home=tmp_path, timeout_s=60)
