"""The figures of the newest steady steps, out of a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.diagnosis.results import MIN_STEPS, BottleneckKind, StepAverages
from stepscope.diagnosis.step_window import find_slowdown, recent_figures
from stepscope.distributed.stragglers.step_phases import FIRST_STEPS
from stepscope.run import read_run
from stepscope.run_setup import setup_of
from stepscope.store import StoreReader
from tests.support.recorded_runs import Row, recorded_run, write_run
from tests.support.step_verdict import verdict
from tests.support.train_devices import SIMULATED

GPU = "GPU-11111111-2222-3333-4444-555555555555"


def figures_of(folder: Path) -> StepAverages:
    with StoreReader(folder) as reader:
        return recent_figures(reader, read_run(folder).run_json)


def steps(count: int, seconds: float, **values: float) -> list[Row]:
    return [((i + 1) * seconds, i + 1, {"perf/step_time": seconds, **values}) for i in range(count)]


def on_gpu(root: Path, rows: list[Row], devices: list[Row], trains_on: str = GPU) -> StepAverages:
    run_json = {"config": {"device": trains_on}}
    return figures_of(write_run(root / "gpu", run_json, gpu=GPU, steps=rows, devices=devices))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("input_bound_cpu", BottleneckKind.INPUT), ("crowded_cpu", BottleneckKind.UNCLEAR)],
)
def test_recorded_runs_get_their_verdict(tmp_path: Path, name: str, kind: BottleneckKind) -> None:
    """That a process waited for a core is not claimed: the kernel's counts were not recorded."""
    folder = recorded_run(tmp_path, name)
    figures = figures_of(folder)
    assert figures.steps >= 60
    found = verdict(figures, setup_of(read_run(folder).run_json, figures.step_time))
    assert found.kind is kind


def test_first_steps_and_old_ones_do_not_count(tmp_path: Path) -> None:
    slow = [(float(i), i, {"perf/step_time": 9.0}) for i in range(1, FIRST_STEPS + 1)]
    old = [(10.0 + i / 10, 10 + i, {"perf/step_time": 0.5}) for i in range(30)]
    new = [(100.0 + i / 10, 100 + i, {"perf/step_time": 0.1}) for i in range(60)]
    first = write_run(tmp_path / "first", steps=slow)
    assert figures_of(first).steps == 0
    assert figures_of(write_run(tmp_path / "empty")) == StepAverages(steps=0)
    rare = write_run(tmp_path / "rare", steps=steps(100, 60.0))
    assert figures_of(rare).steps == MIN_STEPS, "slow steps are counted, not timed"
    whole = figures_of(write_run(tmp_path / "whole", steps=[*slow, *old, *new]))
    assert (whole.steps, whole.step_time) == (60, pytest.approx(0.1))


def test_rows_without_a_step_time_are_no_steps(tmp_path: Path) -> None:
    rows = steps(50, 0.1, **{"perf/data_wait": 0.02})
    validation: Row = (4.95, 49, {"val/loss": 1.0})
    found = figures_of(write_run(tmp_path / "r", steps=[*rows[:49], validation, rows[49]]))
    assert (found.steps, found.data_wait) == (45, pytest.approx(0.02))


def test_what_is_sampled_between_steps_does_not_count(tmp_path: Path) -> None:
    # Steps of 0.1 s in which the GPU is busy, after each a validation of 0.3 s in which it is not.
    rows = [(0.4 * i + 0.1, i, {"perf/step_time": 0.1}) for i in range(60)]
    devices: list[Row] = [
        (0.05 * i, 0, {"gpu/util": 90.0 if i % 8 <= 2 else 10.0}) for i in range(8 * 60)
    ]
    assert on_gpu(tmp_path, rows, devices).utilization == pytest.approx(0.9)


def test_only_the_gpu_that_trains_counts_and_its_throttling_is_named(tmp_path: Path) -> None:
    rows = steps(50, 0.1)
    hot = {"gpu/util": 99.0, "gpu/throttle_reasons": 64.0, "gpu/sm_clock": 1200.0}
    before = {**hot, "gpu/throttle_reasons": 4.0, "gpu/sm_clock": 1980.0}  # a power cap is normal
    devices = [(0.1 * i, 0, before if i < 10 else hot) for i in range(50)]
    found = on_gpu(tmp_path, rows, devices)
    assert found.throttled == pytest.approx(40 / 45, abs=0.03)
    assert on_gpu(tmp_path / "other", rows, devices, "GPU-x").utilization is None
    assert on_gpu(tmp_path / "few", rows, devices[:5]).utilization is None, "too few for a mean"


@pytest.mark.parametrize("seconds", [0.0003, 0.0019])
def test_short_steps_are_looked_at_for_long_enough(tmp_path: Path, seconds: float) -> None:
    """512 of them last less than the second that a mean of the sampler needs."""
    rows = steps(round(6 / seconds), seconds, **{"perf/data_wait": 0.0})
    ticks = [0.1 * i for i in range(60)]
    devices: list[Row] = [(tick, 0, {"gpu/util": 30.0}) for tick in ticks]
    assert on_gpu(tmp_path, rows, devices).utilization == pytest.approx(0.3)
    samples = [(tick, 0, {"process/cpu": 2.0}) for tick in ticks]
    on_cpu = write_run(tmp_path / "cpu", steps=rows, samples=samples)
    assert figures_of(on_cpu).process_cpu == pytest.approx(0.02)


def test_copies_are_those_of_the_steps_that_were_measured(tmp_path: Path) -> None:
    rows = steps(200, 0.1)
    for i, (_, _, values) in enumerate(rows):
        values["perf/gpu_time"] = 0.05
        if i % 8 == 0:
            values["perf/h2d"] = 0.015
    found = figures_of(write_run(tmp_path / "r", steps=rows))
    assert found.copies == pytest.approx(0.015)


def test_the_speed_of_a_simulated_gpu_is_not_judged_and_that_of_its_cpu_is() -> None:
    figures = StepAverages(steps=50, step_time=0.1, data_wait=0.09, utilization=0.05)
    for device, kind in (
        (SIMULATED.id, BottleneckKind.SIMULATED),
        ("GPU-c0da5131-0000-4000-8000-000000000001", BottleneckKind.INPUT),
        ("cpu", BottleneckKind.INPUT),
    ):
        found = verdict(figures, setup_of({"config": {"device": device}}))
        assert found.kind is kind, device
        assert (found.next is None) == (kind is BottleneckKind.SIMULATED) == ("simul" in found.text)


def test_the_setup_of_a_foreign_run_json_is_read_with_care() -> None:
    odd = {"config": 3, "environment": {"cores": "many"}, "compute_capability": ["9", None]}
    setup = setup_of(odd)
    assert (setup.own, setup.cores, setup.capability) == (True, 1, None)
    good = {"environment": {"cores": 8}, "compute_capability": [9, 0], "data_in_memory": True}
    known = setup_of(good)
    assert (known.cores, known.capability, known.in_memory) == (8, (9, 0), True)
    assert setup_of({"kind": "watch", "config": {"pin_memory": True}}).is_on("pin_memory") is False


@pytest.mark.parametrize(
    ("seconds", "steady", "is_told"), [(1.5, True, True), (1.5, False, False), (6.0, False, True)]
)
def test_a_short_run_is_slowing_down_only_if_each_stretch_is_slower(
    tmp_path: Path, seconds: float, steady: bool, is_told: bool
) -> None:
    count = 160
    rise = [i if steady else (0 if i < count / 2 else count) for i in range(count)]
    times = [1 + 6 * each / count for each in rise]
    scale = seconds / sum(times)
    rows: list[Row] = []
    now = 0.0
    for number, each in enumerate(times, 1):
        now += scale * each
        rows.append((now, number, {"perf/step_time": scale * each}))
    with StoreReader(write_run(tmp_path / "run", steps=rows)) as reader:
        assert (find_slowdown(reader, None) is not None) is is_told
