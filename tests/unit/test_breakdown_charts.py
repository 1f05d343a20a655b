"""The memory breakdown on the page: table, figure, peaks, and why a category is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dashboard.charts.memory_breakdown import (
    MAX_READINGS,
    Breakdown,
    breakdown_figure,
    breakdown_of,
    breakdown_rows,
)
from dashboard.views.run_memory import process_rows
from stepscope.run import RunInfo, read_run
from tests.support.breakdown_rows import GPU, ON_GPU, PROCESSES, cuda_run, device, process
from tests.support.recorded_runs import write_run

MIB = 2**20


def read(run: RunInfo) -> Breakdown:
    found = breakdown_of(run)
    assert found is not None
    return found


def test_all_readings_now_and_the_table_sum_to_the_total(tmp_path: Path) -> None:
    found = read(cuda_run(tmp_path))
    assert len(found.readings) == 60
    assert {sum((one.categories or {}).values()) for one in found.readings} == {10240 * MIB}
    assert sum(found.now.values()) == 10240 * MIB
    rows = breakdown_rows(found)
    assert rows[-1]["Now"] == 10240 * MIB
    leaves = [row for row in rows[:-1] if row["Meaning"] != "Sum of the rows below it."]
    assert sum(row["Now"] for row in leaves) == 10240 * MIB
    assert sum(row["Share"] for row in leaves) == pytest.approx(100)


def test_the_figure_stacks_the_used_categories(tmp_path: Path) -> None:
    run = cuda_run(tmp_path, 3000)
    found = read(run)
    assert MAX_READINGS / 2 <= len(found.readings) <= MAX_READINGS  # a long run in buckets
    areas = breakdown_figure(found, run.created)["data"]
    assert "free" not in {area["name"] for area in areas}
    top = sum(area["y"][-1] for area in areas)
    assert top == pytest.approx(2000 / 1024, rel=1e-3)  # GiB


@pytest.mark.parametrize("held", [0.0, 5.0])
def test_gradients_that_no_reading_found_have_a_reason_and_no_peak(
    tmp_path: Path, held: float
) -> None:
    """The page showed a peak of 0 B for a run whose gradients are freed before each reading."""
    tensors = {"memory__parameters": 100.0, "memory__optimizer_state": 0.0}
    gradients = (held, *[0.0] * 8)
    rows = [process(t, **tensors, memory__gradients=size) for t, size in enumerate(gradients)]
    write_run(tmp_path, ON_GPU, gpu=GPU, samples=rows, devices=[device(t, 2000) for t in range(9)])
    found = read(read_run(tmp_path))
    assert found.now["gradients"] == 0
    assert found.peaks.get("gradients") == (5 * MIB if held else None)
    assert found.peaks["optimizer_state"] == 0, "such as of SGD"
    assert any("gradients" in note for note in found.notes) == (not held)


def test_the_notes_have_the_reasons_of_the_runs_process(tmp_path: Path) -> None:
    missing = {GPU: {"processes": "hidden in a container", "gpu/mem_reserved": "old driver"}}
    run = cuda_run(tmp_path, capabilities={"missing": missing})
    told = " ".join(read(run).notes)
    assert (told.count("old driver"), told.count("hidden in a container")) == (1, 2)


def test_other_processes_are_listed_by_memory_and_foreign_text_is_tamed() -> None:
    rows = process_rows({"pid": 1, "gpu_processes": {GPU: PROCESSES}}, GPU)
    assert rows is not None
    assert [row["PID"] for row in rows] == [3, 2, 4, None]
    assert "\x1b" not in rows[0]["Name"]
    assert len(rows[0]["Command"]) == 200
    assert (rows[2]["Name"], rows[2]["User"], rows[2]["Memory"]) == ("—", "— (you)", None)


def test_no_list_is_not_an_empty_one() -> None:
    lists: tuple[Any, ...] = (None, [], {GPU: None}, {"GPU-2": PROCESSES}, {GPU: {"pid": 1}})
    for listed in lists:
        assert process_rows({"gpu_processes": listed}, GPU) is None
    assert process_rows({"gpu_processes": {GPU: []}}, GPU) == []
