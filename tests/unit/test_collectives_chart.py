"""The chart and the table of measured collectives."""

from __future__ import annotations

from typing import Any

from dashboard.charts.collectives import COLORS, SHOWN, SYMBOLS, figure, table_html
from tests.unit.test_collectives_plan import ROW
from trainer.collectives.plan import OPERATIONS

MISSING = {"operation": "broadcast", "bytes": 2**30, "reason": "no room <b>"}


def document(**machine: Any) -> dict[str, Any]:
    return {"machine": machine, "rows": [ROW, {**ROW, "bytes": 4 * 2**20}, MISSING]}


def test_every_operation_has_a_color_and_a_shape_of_its_own() -> None:
    assert set(COLORS) == set(SYMBOLS) == set(OPERATIONS)
    assert len(set(COLORS.values())) == len(set(SYMBOLS.values())) == len(OPERATIONS)


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


def test_the_table_escapes_reasons() -> None:
    html = table_html(document())
    assert "no room &lt;b&gt;" in html
    assert html.count("<tr>") == 4
    assert "1.57 GB/s" in html
