"""Comparison of recorded runs: figures, differences, obstacles, intervals over runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_ind

from stepscope.compare.comparison import (
    MAX_CHARS,
    check_runs,
    compare_runs,
    compare_sides,
    differences,
    obstacles,
)
from stepscope.compare.figures import RunFigures, read_figures
from stepscope.lab.gate import Gate, GateVerdict
from stepscope.run import RunInfo, RunStatus, read_run
from stepscope.run.info import RunNotes, merged
from stepscope.store import StoreWriter
from tests.support.recorded_runs import write_run

CPU = {"cpu": "A CPU", "cores": 8, "torch": "2.13.0"}


def steps(count: int, seconds: float = 0.1, first: float = 5.0) -> list[Any]:
    """Return steps of 32 samples; the first tenth takes `first` seconds each, as if compiling."""
    rows = []
    for step in range(1, count + 1):
        took = first if step <= count / 10 else seconds
        values = {"perf/step_time": took, "perf/samples_per_sec": 32 / took}
        values |= {"train/loss": 2.0 - step / count, "perf/data_wait": took / 4, "score": step}
        rows.append((float(step), step, values))
    return rows


def run(folder: Path, seconds: float = 0.1, count: int = 40, **run_json: Any) -> RunFigures:
    content = {"kind": "init", "name": "job", "environment": CPU, "step": count} | run_json
    memory = {"process/rss": 100.0, "host/mem_total": 1000.0, "host/mem_used": 300.0}
    samples = [(1.0, 1, memory), (2.0, 2, memory | {"process/rss": 250.0}), (3.0, 3, memory)]
    write_run(folder, content, steps=steps(count, seconds), samples=samples)
    return read_figures(read_run(folder))


def made(name: str = "a", run_json: dict[str, Any] | None = None, **values: float) -> RunFigures:
    info = RunInfo(Path(name), RunStatus.FINISHED, None, 0.0, {"kind": "init", **(run_json or {})})
    return RunFigures(info, merged(info.run_json, RunNotes(), name), values, {}, {})


def test_a_step_time_leaves_out_the_warm_up_and_a_rate_is_that_of_the_run(tmp_path: Path) -> None:
    for count in (40, 5000):  # raw rows, and buckets of the store
        found = run(tmp_path / str(count), count=count, ended=1_700_000_060.0, world_size=4)
        values = found.values
        assert values["step_time"] == pytest.approx(0.1)
        assert values["samples_per_s"] == pytest.approx(4 * 32 / (0.1 * 5 + 0.9 * 0.1))
        assert found.samples_per_step == pytest.approx(4 * 32)
        assert values["final train/loss"] == pytest.approx(1.05, abs=0.02)
        assert "best score" not in values  # which is better is not known
        assert (values["peak_process"], values["duration"]) == (250.0, 60.0)
        assert found.memory == {"free": 700, "others": 50, "rest": 250}


def test_energy_is_that_of_the_training_gpu(tmp_path: Path) -> None:
    devices = [(float(s), s, {"gpu/energy": 1000.0 + 200.0 * s}) for s in range(11)]
    folder = write_run(
        tmp_path / "a", {"device": "GPU-1", "kind": "init"}, gpu="GPU-1",
        steps=steps(40), devices=devices,
    )  # fmt: skip
    values = read_figures(read_run(folder)).values
    assert values["energy"] == 2000.0
    assert values["energy_per_sample"] == pytest.approx(200 * 0.1 / 32)


def test_uncommitted_changes_are_code(tmp_path: Path) -> None:
    git = {"commit": "abc", "branch": "main", "dirty": True, "diff": True}
    runs = [run(tmp_path / name, git=git) for name in ("a", "b")]
    assert compare_runs(runs).code == (), "the file is missing in both"
    for name, text in (("a", "-x\n+y\x1b[2J\n"), ("b", "-x\n+z\n")):
        (tmp_path / name / "code.diff").write_text(text)
    found = [read_figures(one.run) for one in runs]
    assert found[0].code_diff == "-x\n+y\n"
    assert [row.label for row in compare_runs(found).code] == ["uncommitted"]


def test_a_run_without_a_store_has_a_problem_and_no_zero(tmp_path: Path) -> None:
    found = run(tmp_path / "a")
    (tmp_path / "a" / "rank0.sqlite").unlink()
    found = read_figures(found.run)
    assert found.problem is not None
    assert set(found.values) <= {"duration", "steps"}
    assert any(found.problem in note for note in compare_runs([found]).notes)
    StoreWriter(tmp_path / "a" / "rank0.sqlite").close()  # a store without a row
    assert read_figures(found.run).problem is None


def test_failed_and_diverged_runs_are_named(tmp_path: Path) -> None:
    rows = [(float(step), step, {"train/loss": math.inf if step > 3 else 1.0}) for step in range(9)]
    content = {"kind": "init", "status": "failed", "reason": "ValueError: bad"}
    write_run(tmp_path / "b", content, steps=rows)
    notes = compare_runs([run(tmp_path / "a"), read_figures(read_run(tmp_path / "b"))]).notes
    assert [note for note in notes if "b failed: ValueError: bad" in note]
    assert [note for note in notes if "not finite" in note and "b:" in note and "loss" in note]


def test_only_what_differs_is_a_difference() -> None:
    nested = ({"a": 1, "net": {"depth": 2, "act": "relu"}}, {"a": 1, "net": {"depth": 3}})
    found = {row.label: row.values for row in differences(nested)}
    assert found == {"net.depth": ("2", "3"), "net.act": ("relu", None)}


def test_long_and_hostile_values_are_compared_whole_and_shown_cut() -> None:
    deep: dict[str, Any] = {"x": {}}
    for _ in range(500):
        deep = {"x": deep}
    long, *_ = differences([{"a": "y" * 999 + "1", "d": deep}, {"a": "y" * 999 + "2", "d": 1}])
    assert len({*long.values}) == 2, "a group of its own for each"
    assert max(len(str(value)) for value in long.values) < MAX_CHARS + 20
    for hostile in ([], "x", 3, None, {"path": 7}, {"gpu": [1]}):
        odd = dict.fromkeys(("config", "environment", "packages", "git", "script", "step"), hostile)
        compare_runs([made("a", odd), made("b")])


def test_changes_are_relative_to_the_chosen_baseline() -> None:
    runs = [made("a", step_time=0.1), made("b", step_time=0.2), made("c", mfu=3.0)]
    found = compare_runs(runs, baseline=1)
    (time, mfu) = found.figures
    assert (time.key, time.values) == ("step_time", (0.1, 0.2, None))
    assert time.changes == (-0.5, 0.0, None)
    assert mfu.changes == (None, None, None), "the baseline has none"


def test_a_run_on_other_hardware_has_no_percentage_of_change() -> None:
    """The page showed +1900% between a CPU and a GPU, as between comparable runs."""
    gpu = {"environment": {**CPU, "gpu": "NVIDIA H100"}}
    runs = [
        made("a", {"environment": CPU}, step_time=0.1),
        made("b", gpu, step_time=0.2),
        made("c", {"environment": CPU}, step_time=0.2),
    ]
    found = compare_runs(runs)
    assert found.figures[0].changes == (0.0, None, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "other"}, "Workload"),
        ({"environment": {**CPU, "gpu": "NVIDIA H100"}}, "Hardware"),
        ({"world_size": 2}, "Ranks"),
        ({"parameters": 12}, "Parameters of the model"),
        ({"environment": {**CPU, "torch": "2.14.0"}}, None),
    ],
)
def test_other_workloads_hardware_and_sizes_are_obstacles(
    change: dict[str, Any], reason: str | None
) -> None:
    base = {"name": "job", "environment": CPU, "parameters": 10}
    found = obstacles([made("a", base), made("b", base | change)])
    assert [text.partition(":")[0] for text in found] == ([] if reason is None else [reason])


def test_another_batch_size_is_an_obstacle() -> None:
    runs = [replace(made(), samples_per_step=size) for size in (32.0, 64.0)]
    assert len(obstacles(runs)) == 1
    assert obstacles([replace(runs[0], samples_per_step=32.0000001), runs[0]]) == ()


def test_an_interval_is_welchs_of_logarithms_and_shares_its_level() -> None:
    """Of two figures each has half of the error probability."""
    sides = [[0.1, 0.11, 0.12], [0.13, 0.15]]
    base, new = ([made(step_time=v, mfu=1 / v) for v in values] for values in sides)
    row = compare_sides(base, new)[0]
    welch = ttest_ind(np.log(sides[1]), np.log(sides[0]), equal_var=False)
    expected = np.expm1(welch.confidence_interval(0.975))
    assert (row.low, row.high) == pytest.approx(tuple(expected))
    assert row.is_different is bool(expected[0] > 0)


def test_one_run_a_side_has_numbers_and_no_interval() -> None:
    (row,) = compare_sides([made(step_time=1.0)], [made(step_time=1.5), made(step_time=1.5)])
    assert (row.base, row.new, row.low, row.is_different) == (1.0, 1.5, None, None)
    assert row.change == pytest.approx(0.5)


def test_values_without_a_logarithm_have_means_only() -> None:
    base, new = ([made(**{"final score": v}) for v in values] for values in ((-1, 1), (1, 3)))
    (row,) = compare_sides(base, new)
    assert (row.base, row.new, row.change, row.is_different) == (0.0, 2.0, None, None)


def test_runs_without_a_spread_have_no_interval() -> None:
    for old, changed in ((100.0, 110.0), (0.1, 0.1), (1e9 / 3, 1e9 / 3), (7e10, 7e10)):
        base, new = [made(step_time=old)] * 2, [made(step_time=changed)] * 3
        (row,) = compare_sides(base, new)
        assert row.change == pytest.approx(changed / old - 1)
        assert (row.low, row.high, row.is_different, row.is_equal) == (None, None, None, True)
    rounded = [made(step_time=0.3, mfu=1.0), made(step_time=0.1 + 0.2, mfu=1.1)]
    rows = {row.key: row for row in compare_sides(rounded, rounded)}
    assert rows["step_time"].is_equal
    assert not rows["mfu"].is_equal


@pytest.mark.parametrize(
    ("runs", "new", "verdict"),
    [(2, 1.0, "inconclusive"), (3, 1.0, "passed"), (3, 2.0, "regression")],
)
def test_only_equal_peak_memory_decides_a_gate_without_a_spread(
    runs: int, new: float, verdict: str
) -> None:
    sides = [[made(peak_allocated=value, step_time=value)] * runs for value in (1.0, new)]
    result, of_time = check_runs(*sides, [Gate("peak_memory", 0.03), Gate("step_time", 0.03)])
    assert of_time.verdict is GateVerdict.INCONCLUSIVE
    assert (result.verdict, result.change) == (verdict, new - 1)
