"""The breakdown over time: two series of a run's store on one time axis."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.memory.breakdown_series import (
    BreakdownReading,
    BreakdownSource,
    breakdown_source,
    newest_breakdown,
    peaks,
    read_breakdown,
)
from stepscope.store import StoreReader
from tests.support.breakdown_rows import GPU, TICK_S, device, process, sample
from tests.support.recorded_runs import CREATED, Row, write_run

MIB = 2**20


TENSORS = {
    "memory__parameters": 100.0,
    "memory__gradients": 10.0,
    "memory__optimizer_state": 200.0,
}
ONLY_PYTORCH = {"split": 50, "cached": 150, "activations": 800}


def source_of(reader: StoreReader, gpu: str | None = GPU) -> BreakdownSource:
    source = breakdown_source(reader.series(), gpu)
    assert source is not None
    return source


def found(
    folder: Path, rows: list[Row], devices: list[Row] | None, bucket: int = 1, gpu: str | None = GPU
) -> list[BreakdownReading]:
    """Return the moments of a run with these rows."""
    streams = {"samples": rows} | ({} if devices is None else {"devices": devices})
    write_run(folder, gpu=GPU, **streams)
    with StoreReader(folder) as reader:
        source = source_of(reader, gpu)
        return read_breakdown(reader, source, -(-source.samples.rows // bucket))


def parts(moment: BreakdownReading) -> dict[str, float]:
    """The parts of a moment in MiB."""
    assert moment.categories is not None
    return {key: size / MIB for key, size in moment.categories.items()}


def test_a_moment_joins_the_process_with_the_nearest_row_of_the_gpu(tmp_path: Path) -> None:
    rows = [process(tick, 1000 + tick) for tick in range(30)]
    moments = found(tmp_path, rows, [device(tick, 2000 + tick) for tick in range(30)])
    assert len(moments) == 30
    for tick, moment in enumerate(moments):
        assert moment.ts == pytest.approx(CREATED + tick * TICK_S)
        assert parts(moment) == {
            "free": 10240 - 2000 - tick,
            "elsewhere": 1000,
            "split": 50,
            "cached": 150,
            "activations": 800 + tick,
        }


@pytest.mark.parametrize(
    ("key", "own", "gpu", "held"),
    [
        ("others", {}, {"gpu__mem_others": 300.0}, 50),  # 5 s
        ("parameters", TENSORS, {}, 600),  # a minute: steps may be long
    ],
)
def test_a_value_that_is_read_less_often_is_held(
    tmp_path: Path, key: str, own: dict[str, float], gpu: dict[str, float], held: int
) -> None:
    count = held + 40
    rows = [process(tick, **(own if tick == 5 else {})) for tick in range(count)]
    devices = [device(tick, **(gpu if tick == 5 else {})) for tick in range(count)]
    known = [key in parts(moment) for moment in found(tmp_path, rows, devices)]
    assert known[: held + 4] == [tick >= 5 for tick in range(held + 4)]
    assert not any(known[held + 7 :])


def test_between_their_samples_others_move_with_the_rest_of_the_used_memory(
    tmp_path: Path,
) -> None:
    own, others = {"memory__process_used": 1300.0}, {"gpu__mem_others": 700.0}
    rows = [
        process(tick, 1000 + 50 * (tick >= 6), **(own if tick == 0 else {})) for tick in range(9)
    ]
    used = [2100 + 500 * (tick >= 3) + 50 * (tick >= 6) for tick in range(9)]
    gpu = [device(tick, used[tick], **(others if tick == 0 else {})) for tick in range(9)]
    moments = [parts(moment) for moment in found(tmp_path, rows, gpu)]
    assert [moment["others"] for moment in moments] == [700] * 3 + [1200] * 6
    assert [moment["outside"] for moment in moments] == [300] * 9
    assert [moment["elsewhere"] for moment in moments] == [100] * 9


def test_a_tick_without_the_allocator_is_no_moment_and_silence_is_merged(tmp_path: Path) -> None:
    rows = [process(tick) if tick < 10 else sample(tick, process__rss=900) for tick in range(90)]
    moments = found(tmp_path, rows, [device(tick) for tick in range(90)])
    known = [moment.categories is not None for moment in moments]
    assert known[:58] == [tick < 10 for tick in range(58)]
    assert all(known[61:])
    assert parts(moments[70]) == {"free": 10240 - 2000, "elsewhere": 2000}


def test_a_gpu_without_samples_leaves_pytorchs_memory(tmp_path: Path) -> None:
    rows = [process(tick) for tick in range(90)]
    moments = found(tmp_path / "lost", rows, [device(tick) for tick in range(10)])
    assert "free" in parts(moments[30])
    assert parts(moments[80]) == ONLY_PYTORCH
    assert parts(found(tmp_path / "none", rows[:5], None)[-1]) == ONLY_PYTORCH


def test_a_run_on_the_cpu_divides_the_host(tmp_path: Path) -> None:
    host = {"host__mem_total": 8000.0, "host__mem_used": 5000.0, "process__children_rss": 700.0}
    rows = [
        sample(tick, process__rss=900, **(host if tick % 10 == 0 else {})) for tick in range(20)
    ]
    moments = found(tmp_path, rows, None, gpu=None)
    expected = {"free": 3000, "others": 3400, "workers": 700, "rest": 900}
    assert [parts(moment) for moment in moments] == [expected] * 20


def test_each_category_has_its_own_peak(tmp_path: Path) -> None:
    """A column of one instant showed 189 MiB allocated where the run's peak was 1.61 GiB."""
    rows = [process(tick, 1500 if tick == 21 else 1000) for tick in range(40)]
    rows += [sample(40, memory__peak_allocated=1400.0, memory__parameters=70.0)]
    gpu = [device(tick, 3000 + (500 if tick == 3 else 0)) for tick in range(40)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    with StoreReader(tmp_path) as reader:
        highest = peaks(reader, source_of(reader))
    expected = {"reserved": 1500 * MIB, "allocated": 1400 * MIB, "parameters": 70 * MIB}
    assert highest.items() >= expected.items()
    assert "activations" not in highest, "a difference of samples has no peak"


@pytest.mark.parametrize("ticks", [5, 64, 700])
def test_the_newest_breakdown_is_the_last_one(tmp_path: Path, ticks: int) -> None:
    rows = [
        process(tick, 1000 + tick, **(TENSORS if tick % 10 == 0 else {})) for tick in range(ticks)
    ]
    whole = found(tmp_path, rows, [device(tick, 3000 + tick) for tick in range(ticks)])
    with StoreReader(tmp_path) as reader:
        newest = newest_breakdown(reader, source_of(reader))
    assert newest == whole[-1]


@pytest.mark.parametrize("bucket", [2, 16, 64, 1024])
def test_buckets_sum_to_the_total_as_well(tmp_path: Path, bucket: int) -> None:
    rows = [process(tick, 1000 + tick % 97) for tick in range(5000)]
    devices = [device(tick, 2000 + tick % 97 + 4000 * (tick == 777)) for tick in range(5000)]
    moments = found(tmp_path, rows, devices, bucket)
    assert len(moments) == -(-5000 // bucket)
    for moment in moments:
        assert sum(parts(moment).values()) == 10240
        assert parts(moment)["elsewhere"] == pytest.approx(1000, rel=0.1, abs=4000 / bucket)
