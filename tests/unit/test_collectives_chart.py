"""The chart and the table of measured collectives."""

from __future__ import annotations

from typing import Any

import pytest

from dashboard.charts.collectives import MAX_SIZE_LABELS, STYLES, figure, table_rows
from tests.support.collectives_results import ROW
from trainer.collectives.plan import OPERATIONS

MISSING = {"operation": "broadcast", "bytes": 2**30, "reason": "no room <b>"}


def document(**machine: Any) -> dict[str, Any]:
    return {"machine": machine, "rows": [ROW, {**ROW, "bytes": 4 * 2**20}, MISSING]}


def test_every_operation_has_a_color_and_a_shape_of_its_own() -> None:
    assert set(STYLES) == set(OPERATIONS)
    assert all(len(set(column)) == len(OPERATIONS) for column in zip(*STYLES.values(), strict=True))


def test_a_line_for_each_operation_and_another_measurement_is_dotted() -> None:
    drawn = figure(document(), document(link={"name": "PCIe", "bytes_per_s": 31.5e9}))
    assert drawn is not None
    line, compared = drawn["data"]
    assert line["x"] == [2**20, 4 * 2**20]
    assert line["y"][0] == ROW["bus"] / 1e9
    assert [each["line"]["dash"] for each in (line, compared)] == ["solid", "dot"]
    assert drawn["layout"]["xaxis"]["type"] == drawn["layout"]["yaxis"]["type"] == "log"
    assert "shapes" not in drawn["layout"]
    assert figure({"rows": [MISSING], "machine": {}}) is None
    linked = figure(document(link={"name": "PCIe", "bytes_per_s": 31.5e9}))
    assert linked is not None
    assert linked["layout"]["shapes"][0]["y0"] == 31.5, "the peak of the link"


@pytest.mark.parametrize("last", range(2, 12))
def test_the_largest_size_is_named_on_the_axis(last: int) -> None:
    sizes = [2**10 * 4**power for power in range(last)]
    drawn = figure({"machine": {}, "rows": [{**ROW, "bytes": size} for size in sizes]})
    assert drawn is not None
    axis = drawn["layout"]["xaxis"]
    assert axis["tickvals"][-1] == sizes[-1]
    assert 1 < len(axis["tickvals"]) == len(axis["ticktext"]) <= MAX_SIZE_LABELS
    assert set(axis["tickvals"]) <= set(sizes)


def test_a_row_has_its_results_or_the_reason_why_there_is_none() -> None:
    first, _, missing = table_rows(document())
    assert first["Bus"] == pytest.approx(1.57, abs=0.01)
    assert missing == {"Operation": "broadcast", "Size": "1.00 GiB", "Reason": "no room <b>"}
