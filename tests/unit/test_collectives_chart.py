"""The chart and the table of measured collectives."""

from __future__ import annotations

from typing import Any

import pytest

from dashboard.charts.collectives import MAX_SIZE_LABELS, SHOWN, STYLES, figure, table_rows
from tests.support.collectives_results import ROW
from trainer.collectives.measurement import OPERATIONS

MISSING = {"operation": "broadcast", "bytes": 2**30, "reason": "no room <b>"}


def document(**machine: Any) -> dict[str, Any]:
    return {"machine": machine, "rows": [ROW, {**ROW, "bytes": 4 * 2**20}, MISSING]}


def test_every_operation_has_a_color_and_a_shape_of_its_own() -> None:
    assert set(STYLES) == set(OPERATIONS)
    assert all(len(set(column)) == len(OPERATIONS) for column in zip(*STYLES.values(), strict=True))


def test_a_line_for_each_operation_in_the_unit_of_the_axis() -> None:
    for shown, (key, factor, unit) in SHOWN.items():
        drawn = figure(shown, document())
        assert drawn is not None
        (line,) = drawn["data"]
        assert line["x"] == [2**20, 4 * 2**20]
        assert line["y"][0] == ROW[key] * factor
        assert unit in drawn["layout"]["yaxis"]["title"]["text"]
        assert drawn["layout"]["xaxis"]["type"] == drawn["layout"]["yaxis"]["type"] == "log"


def test_the_link_is_a_line_beside_bus_bandwidth_only() -> None:
    linked = document(link={"name": "PCIe", "bytes_per_s": 31.5e9})
    bus, time = figure("Bus bandwidth", linked), figure("Time", linked)
    assert bus is not None
    assert bus["layout"]["shapes"][0]["y0"] == 31.5
    assert time is not None
    assert "shapes" not in time["layout"]


def test_another_measurement_is_dotted() -> None:
    drawn = figure("Time", document(), document())
    assert drawn is not None
    assert [line["line"]["dash"] for line in drawn["data"]] == ["solid", "dot"]
    assert figure("Time", {"rows": [MISSING], "machine": {}}) is None


@pytest.mark.parametrize("last", range(2, 12))
def test_the_largest_size_is_named_on_the_axis(last: int) -> None:
    sizes = [2**10 * 4**power for power in range(last)]
    drawn = figure("Time", {"machine": {}, "rows": [{**ROW, "bytes": size} for size in sizes]})
    assert drawn is not None
    axis = drawn["layout"]["xaxis"]
    assert axis["tickvals"][-1] == sizes[-1]
    assert 1 < len(axis["tickvals"]) == len(axis["ticktext"]) <= MAX_SIZE_LABELS
    assert set(axis["tickvals"]) <= set(sizes)


def test_times_and_bandwidths_have_the_unit_that_suits_them() -> None:
    slow = {**ROW, "seconds": 0.0670033, "algorithm": 409e3, "bus": 614e3}
    drawn = figure("Time", {"machine": {}, "rows": [slow]})
    assert drawn is not None
    told = drawn["data"][0]["text"][0]
    assert all(part in told for part in ("67.0 ms", "0.409 MB/s", "0.614 MB/s"))


def test_a_row_has_its_results_or_the_reason_why_there_is_none() -> None:
    first, _, missing = table_rows(document())
    assert first["Bus"] == pytest.approx(1.57, abs=0.01)
    assert missing == {"Operation": "broadcast", "Size": "1.00 GiB", "Reason": "no room <b>"}
