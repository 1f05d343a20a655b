"""The folded charts of a job's collectives, and what they say where something is missing."""

from __future__ import annotations

from typing import Any

from dashboard.charts.layout import communication, layout
from dashboard.charts.run_view import RunView
from dashboard.charts.series import FOLDED
from stepscope.distributed.collective_metrics import KEYS, NONE_LARGE, NOT_BY_GLOO, SWITCHED_OFF


def job(**reasons: str) -> RunView:
    return RunView(has_cuda=False, ranks=2, collectives=reasons)


def charts(content: RunView) -> dict[str, Any]:
    return {made["id"]: made for made in communication(content)}


def test_a_run_of_one_process_has_none() -> None:
    assert communication(RunView(has_cuda=True)) == []


def test_a_timed_job_has_all_of_them_folded_away() -> None:
    found = charts(job())
    assert list(found) == ["communication", "bus"]
    drawn = {line["metric"] for made in found.values() for line in made["traces"]}
    assert drawn == {"comm/rate", "comm/share", "comm/bus_bandwidth"} <= FOLDED
    assert {made["group"] for made in found.values()} == {"more"}
    assert {line["series"] for made in found.values() for line in made["traces"]} == {"samples"}
    made = layout(job())
    assert made["metrics"]["comm/rate"]["unit"] == "B/s"


def test_what_is_missing_is_said_once_with_the_reason() -> None:
    times = dict.fromkeys(("comm/time", "comm/share", "comm/bus_bandwidth"), NOT_BY_GLOO)
    found = charts(job(**times))
    assert found["communication"]["note"] == f"Collectives of rank 0. No times: {NOT_BY_GLOO}."
    assert "bus" not in found
    assert "bus" not in charts(job(**{"comm/bus_bandwidth": NONE_LARGE}))
    off = charts(job(**dict.fromkeys(KEYS, SWITCHED_OFF)))
    assert off["communication"]["empty"] == f"Collectives are not read: {SWITCHED_OFF}."
    assert "No times" not in off["communication"]["note"]
