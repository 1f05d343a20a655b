"""What the page is told of the ledger: the new moments, those now and of the peak, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dashboard.charts import memory_breakdown, series
from dashboard.charts.memory_breakdown import SERIES, TOTAL
from dashboard.charts.series import SeriesCursor
from dashboard.views.run_memory import process_rows
from stepscope.memory.allocator import NO_SPLIT
from stepscope.run import RunInfo, RunKind, read_run
from stepscope.store import StoreReader
from tests.support.ledger_rows import GPU, ON_GPU, PROCESSES, cuda_run, device, process, sample
from tests.support.recorded_runs import write_run

MIB = 2**20


def answer(run: RunInfo, cursors: dict[str, SeriesCursor] | None = None) -> dict[str, Any]:
    with StoreReader(run.folder) as reader:
        found = memory_breakdown.update(reader, run, cursors or {}, 0)
    json.dumps(found, allow_nan=False)
    return found


def test_the_first_answer_has_all_moments_and_sums_to_the_total(tmp_path: Path) -> None:
    found = answer(cuda_run(tmp_path))
    part = found["series"][SERIES]
    assert (part["reset"], part["end"], part["bucket"], len(part["t"])) == (True, 60, 1, 60)
    columns = {key: values["mean"] for key, values in part["v"].items()}
    for row in range(60):
        total = sum(column[row] for key, column in columns.items() if key != TOTAL)
        assert total == pytest.approx(columns[TOTAL][row], rel=1e-5)
        assert columns[TOTAL][row] == pytest.approx(10240 * MIB, rel=1e-5)
    [chart] = memory_breakdown.ledger_layout(read_run(tmp_path))["charts"]
    assert {trace["metric"] for trace in chart["traces"]} >= set(columns)


def test_a_poll_answers_only_new_moments_a_long_run_in_buckets(tmp_path: Path) -> None:
    run = cuda_run(tmp_path, 3000)
    part = answer(run)["series"][SERIES]
    assert (part["bucket"], len(part["t"])) == (8, 375)
    found = answer(run, {SERIES: SeriesCursor(2995, 8)})
    part = found["series"][SERIES]
    assert (part["reset"], part["first"], len(part["t"])) == (False, 2992, 1)
    assert len(json.dumps(found["series"])) < 2_000
    assert answer(run, {SERIES: SeriesCursor(3000, 8)})["series"][SERIES]["v"] == {}


def test_now_is_one_moment_and_peaks_are_the_parts_own(tmp_path: Path) -> None:
    found = answer(cuda_run(tmp_path))["ledger"]
    assert found["now"]["t"] == pytest.approx(5.9)
    values = found["now"]["v"]
    assert values[TOTAL] == sum(size for key, size in values.items() if key != TOTAL)
    assert values["ledger/free"] == (10240 - 2000) * MIB
    assert "ledger/free" not in found["peaks"]
    assert found["peaks"]["ledger/reserved"] >= values["ledger/split"]


@pytest.mark.parametrize("held", [0.0, 5.0])
def test_gradients_that_no_reading_found_have_a_reason_and_no_peak(
    tmp_path: Path, held: float
) -> None:
    """The page showed a peak of 0 B for a run whose gradients are freed before each reading."""
    tensors = {"memory__parameters": 100.0, "memory__optimizer_state": 0.0}
    gradients = (held, *[0.0] * 8)
    rows = [process(t, **tensors, memory__gradients=size) for t, size in enumerate(gradients)]
    write_run(tmp_path, ON_GPU, gpu=GPU, samples=rows, devices=[device(t, 2000) for t in range(9)])
    found = answer(read_run(tmp_path))["ledger"]
    assert found["now"]["v"]["ledger/gradients"] == 0
    assert found["peaks"].get("ledger/gradients") == (5 * MIB if held else None)
    assert found["peaks"]["ledger/optimizer_state"] == 0, "such as of SGD"
    assert any("gradients" in note for note in found["notes"]) == (not held)


def test_the_notes_have_the_reasons_of_the_runs_process(tmp_path: Path) -> None:
    missing = {GPU: {"processes": "hidden in a container", "gpu/mem_reserved": "old driver"}}
    run = cuda_run(tmp_path, capabilities={"missing": missing})
    assert answer(run)["ledger"]["notes"] == [
        "The driver's own reserve is included in the used memory: old driver.",
        (
            "Other processes cannot be separated from this one's memory outside PyTorch: "
            "hidden in a container."
        ),
        (
            "Allocated memory is not broken down into parameters, gradients, optimizer "
            "state and other: it was not recorded at this moment."
        ),
    ]


def test_a_split_that_torch_does_not_count_is_missing_and_not_zero(tmp_path: Path) -> None:
    run = cuda_run(tmp_path, capabilities={"split": NO_SPLIT})
    found = answer(run)
    now = found["ledger"]["now"]["v"]
    assert now["ledger/cache"] == 200 * MIB
    assert not {"ledger/split", "ledger/cached"} & set(now)
    assert not {"ledger/split", "ledger/cached"} & set(found["series"][SERIES]["v"])
    assert (
        "Cached memory is not split into reclaimable and fragmented memory: torch does not count "
        "the split of expandable segments (expandable_segments:True)."
    ) in found["ledger"]["notes"]


@pytest.mark.parametrize("capabilities", [[], {"missing": []}, {"missing": {GPU: {"x": 1}}}])
def test_capabilities_in_another_form_give_no_reason(tmp_path: Path, capabilities: Any) -> None:
    run = cuda_run(tmp_path, capabilities=capabilities)
    assert memory_breakdown.missing_reasons(run) == {}
    assert answer(run)["ledger"]["notes"]


def test_the_parts_are_a_series_of_the_memory_tab_alone(tmp_path: Path) -> None:
    run = cuda_run(tmp_path)
    with StoreReader(tmp_path) as reader:
        live = series.update(reader, run, {}, 0)
        window = memory_breakdown.window_part(reader, run, "time", 2.0, 3.0)[SERIES]
    assert SERIES not in live["series"]
    assert (window["first"], len(window["t"])) == (19, 13)  # a row more on either side


def test_a_run_without_samples_has_no_ledger(tmp_path: Path) -> None:
    write_run(tmp_path, steps=[(0.0, 1, {"train/loss": 1.0})])
    assert "ledger" not in answer(read_run(tmp_path))


def test_a_recording_of_the_machine_shows_its_first_gpu(tmp_path: Path) -> None:
    rows = [sample(tick, host__mem_used=100) for tick in range(5)]
    gpu = [device(tick) for tick in range(5)]
    run_json = ON_GPU | {"kind": RunKind.RECORD, "device": None}
    write_run(tmp_path, run_json, gpu=GPU, samples=rows, devices=gpu)
    values = answer(read_run(tmp_path))["ledger"]["now"]["v"]
    expected = {"ledger/free": 8240, "ledger/used": 2000, TOTAL: 10240}
    assert {key: size // MIB for key, size in values.items()} == expected


def test_the_sums_of_the_table_are_of_parts_that_exist(tmp_path: Path) -> None:
    for run_json in (ON_GPU, {"device": "cpu"}):
        write_run(tmp_path / run_json["device"], run_json, samples=[process(0)])
        layout = memory_breakdown.ledger_layout(read_run(tmp_path / run_json["device"]))
        [chart] = layout["charts"]
        known = {trace["metric"] for trace in chart["traces"]}
        for line in layout["sums"]:
            assert set(line["of"]) <= known
        assert known <= set(layout["metrics"])


def test_other_processes_are_listed_by_memory_and_foreign_text_is_tamed() -> None:
    rows = process_rows({"pid": 1, "gpu_processes": {GPU: PROCESSES}}, GPU)
    assert rows is not None
    assert [row["PID"] for row in rows] == [3, 2, 4, None]
    assert rows[0]["Name"].startswith("large")
    assert "\x1b" not in rows[0]["Name"]
    assert len(rows[0]["Command"]) == 200
    assert rows[0]["Command"].startswith("a b a b")
    assert rows[1]["State"].startswith("zombie")
    assert (rows[2]["Name"], rows[2]["User"], rows[2]["Memory"]) == ("—", "— (you)", None)
    assert rows[3]["Memory"] is None


def test_no_list_is_not_an_empty_one() -> None:
    lists: tuple[Any, ...] = (None, [], {}, {GPU: None}, {"GPU-2": PROCESSES}, {GPU: {"pid": 1}})
    for listed in lists:
        assert process_rows({"gpu_processes": listed}, GPU) is None
    assert process_rows({"gpu_processes": {GPU: []}}, GPU) == []
