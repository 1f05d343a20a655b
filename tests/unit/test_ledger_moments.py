"""The ledger over time: two series of a run's store on one time axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.memory.breakdown import MemoryDomain
from stepscope.memory.breakdown_series import (
    BreakdownSample,
    BreakdownSource,
    ledger_source,
    newest_moment,
    peaks,
    read_moments,
)
from stepscope.store import SeriesBlock, StoreReader, StoreWriter
from stepscope.store.blocks import Floats
from tests.support.ledger_rows import GPU, TICK_S, device, process, sample
from tests.support.recorded_runs import CREATED, write_run

MIB, GIB = 2**20, 2**30


def found(folder: Path, gpu: str | None = GPU, bucket: int = 1) -> list[BreakdownSample]:
    with StoreReader(folder) as reader:
        source = ledger_source(reader.series(), gpu)
        assert source is not None
        return read_moments(reader, source, 0, source.samples.rows, bucket)


def parts(moment: BreakdownSample) -> dict[str, float]:
    """The parts of a moment in MiB."""
    assert moment.parts is not None
    return {key: size / MIB for key, size in moment.parts.items()}


def test_a_moment_joins_the_process_with_the_gpu_beside_it(tmp_path: Path) -> None:
    rows = [process(tick, 1000 + tick) for tick in range(30)]
    gpu = [device(tick, 2000 + tick) for tick in range(30)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    moments = found(tmp_path)
    assert len(moments) == 30
    assert [moment.step for moment in moments[:6]] == [0, 0, 0, 0, 0, 1]
    for tick, moment in enumerate(moments):
        assert moment.ts == pytest.approx(CREATED + tick * TICK_S)
        assert parts(moment) == {
            "free": 10240 - 2000 - tick,
            "elsewhere": 1000,
            "split": 50,
            "cached": 150,
            "allocated": 800 + tick,
        }


def test_what_is_read_once_a_second_counts_in_between_but_not_for_ever(tmp_path: Path) -> None:
    rows = [process(tick) for tick in range(90)]
    gpu = [device(tick, **({"gpu__mem_others": 300.0} if tick == 5 else {})) for tick in range(90)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    told = ["others" in parts(moment) for moment in found(tmp_path)]
    assert told[:54] == [tick >= 5 for tick in range(54)]
    assert not any(told[57:])  # 5 s later


def test_tensors_are_read_between_steps_which_may_be_long(tmp_path: Path) -> None:
    tensors = {
        "memory__parameters": 100.0,
        "memory__gradients": 10.0,
        "memory__optimizer_state": 200.0,
    }
    rows = [process(tick, **(tensors if tick == 5 else {})) for tick in range(700)]
    gpu = [device(tick) for tick in range(700)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    told = ["parameters" in parts(moment) for moment in found(tmp_path)]
    assert told[:604] == [tick >= 5 for tick in range(604)]
    assert not any(told[607:])  # a minute later


def test_between_two_readings_of_the_process_it_moves_with_pytorch(tmp_path: Path) -> None:
    rows = [
        process(
            tick,
            1000 + 100 * (tick >= 3),
            **({"memory__process_used": 1300.0} if tick == 0 else {}),
        )
        for tick in range(8)
    ]
    gpu = [device(tick, 2000 + 100 * (tick >= 3), gpu__mem_others=700) for tick in range(8)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    assert [parts(moment)["outside"] for moment in found(tmp_path)] == [300] * 8
    assert not any("unnamed" in parts(moment) for moment in found(tmp_path))


def test_between_two_readings_of_the_others_they_take_what_this_process_has_not(
    tmp_path: Path,
) -> None:
    own = {"memory__process_used": 1300.0}
    rows = [
        process(tick, 1000 + 50 * (tick >= 6), **(own if tick == 0 else {})) for tick in range(9)
    ]
    gpu = [
        device(
            tick,
            2100 + 500 * (tick >= 3) + 50 * (tick >= 6),
            **({"gpu__mem_others": 700.0} if tick == 0 else {}),
        )
        for tick in range(9)
    ]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    moments = [parts(moment) for moment in found(tmp_path)]
    assert [moment["others"] for moment in moments] == [700] * 3 + [1200] * 6
    assert [moment["outside"] for moment in moments] == [300] * 9
    assert [moment["unnamed"] for moment in moments] == [100] * 9


def test_a_tick_without_the_allocator_is_no_moment_and_silence_is_merged(tmp_path: Path) -> None:
    rows = [process(tick) if tick < 10 else sample(tick, process__rss=900) for tick in range(90)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=[device(tick) for tick in range(90)])
    moments = found(tmp_path)
    known = [moment.parts is not None for moment in moments]
    assert known[:58] == [tick < 10 for tick in range(58)]
    assert all(known[61:])
    assert parts(moments[70]) == {"free": 10240 - 2000, "used": 2000}


def test_a_gpu_that_stops_answering_leaves_what_pytorch_holds(tmp_path: Path) -> None:
    gpu = [device(tick) for tick in range(10)]
    write_run(tmp_path, gpu=GPU, samples=[process(tick) for tick in range(90)], devices=gpu)
    moments = found(tmp_path)
    assert "free" in parts(moments[30])
    assert parts(moments[80]) == {"split": 50, "cached": 150, "allocated": 800}


def test_a_run_on_the_cpu_divides_the_host(tmp_path: Path) -> None:
    host = {"host__mem_total": 8000.0, "host__mem_used": 5000.0, "process__children_rss": 700.0}
    rows = [
        sample(tick, process__rss=900, **(host if tick % 10 == 0 else {})) for tick in range(20)
    ]
    write_run(tmp_path, samples=rows)
    moments = found(tmp_path, gpu=None)
    expected = {"free": 3000, "others": 3400, "workers": 700, "process": 900}
    assert [parts(moment) for moment in moments] == [expected] * 20


def test_a_run_whose_gpu_nobody_samples_has_what_pytorch_holds(tmp_path: Path) -> None:
    write_run(tmp_path, samples=[process(tick) for tick in range(5)])
    assert parts(found(tmp_path)[-1]) == {"split": 50, "cached": 150, "allocated": 800}


def test_each_part_has_a_peak_of_its_own_time(tmp_path: Path) -> None:
    """A column of one instant showed 189 MiB allocated where the run's peak was 1.61 GiB."""
    rows = [process(tick, 1500 if tick == 21 else 1000) for tick in range(40)]
    rows += [sample(40, memory__peak_allocated=1400.0, memory__parameters=70.0)]
    gpu = [device(tick, 3000 + (500 if tick == 3 else 0)) for tick in range(40)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    with StoreReader(tmp_path) as reader:
        source = ledger_source(reader.series(), GPU)
        assert source is not None
        found = peaks(reader, source)
    assert {key: found[key] for key in ("reserved", "allocated", "parameters")} == {
        "reserved": 1500 * MIB,
        "allocated": 1400 * MIB,
        "parameters": 70 * MIB,
    }
    assert "activations" not in found, "a difference of readings has no peak of its own"


def test_nothing_was_sampled(tmp_path: Path) -> None:
    write_run(tmp_path, steps=[(0.0, 1, {"train/loss": 1.0})])
    with StoreReader(tmp_path) as reader:
        assert ledger_source(reader.series(), GPU) is None


@pytest.mark.parametrize("bucket", [1, 2, 8])
@pytest.mark.parametrize(("start", "stop"), [(0, 64), (13, 24), (40, 64), (56, 64)])
def test_any_part_of_the_rows_gives_the_same_moments(
    tmp_path: Path, start: int, stop: int, bucket: int
) -> None:
    tensors = {
        "memory__parameters": 100.0,
        "memory__gradients": 10.0,
        "memory__optimizer_state": 200.0,
    }
    rows = [process(tick, 1000 + tick, **(tensors if tick % 10 == 0 else {})) for tick in range(64)]
    gpu = [device(tick, 3000 + tick) for tick in range(64)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=gpu)
    whole = found(tmp_path, bucket=bucket)
    with StoreReader(tmp_path) as reader:
        source = ledger_source(reader.series(), GPU)
        assert source is not None
        part = read_moments(reader, source, start, stop, bucket)
        newest = newest_moment(reader, source)
    assert part == whole[start // bucket : -(-stop // bucket)]
    assert newest == found(tmp_path)[-1]


def long_run(folder: Path, ticks: int, peak: int) -> BreakdownSource:
    """A long run with noise and one short peak; written as arrays, at several rollup levels."""
    rng = np.random.default_rng(1)
    ts = CREATED + TICK_S * np.arange(ticks)
    used = 4 * GIB + rng.integers(0, 100, ticks) * MIB
    used[peak] = 9 * GIB
    reserved = used - 1 * GIB
    writer = StoreWriter(folder / "rank0.sqlite")

    def append(stream: str, source: str, ts: Floats, columns: dict[str, Any]) -> None:
        values = np.array([np.broadcast_to(column, (ticks,)) for column in columns.values()])
        block = SeriesBlock.raw(tuple(columns), ts, np.arange(ticks) // 5.0, values.astype(float))
        with writer.transaction():
            writer.append(stream, source, block)

    allocated = reserved - 256 * MIB
    append("samples", "", ts, {"memory/reserved": reserved, "memory/allocated": allocated})
    append("devices", GPU, ts + 0.003, {"gpu/mem_used": used, "gpu/mem_total": 16 * GIB})
    writer.close()
    with StoreReader(folder) as reader:
        source = ledger_source(reader.series(), GPU)
    assert source is not None
    return source


@pytest.mark.parametrize("peak", [0, 777, 39_999])
def test_a_peak_of_one_tick_is_found_in_a_long_run(tmp_path: Path, peak: int) -> None:
    source = long_run(tmp_path, 40_000, peak)
    with StoreReader(tmp_path) as reader:
        assert peaks(reader, source)["reserved"] == 8 * GIB


@pytest.mark.parametrize("bucket", [2, 16, 64, 1024])
def test_buckets_sum_to_the_total_as_well(tmp_path: Path, bucket: int) -> None:
    source = long_run(tmp_path, 40_000, 777)
    with StoreReader(tmp_path) as reader:
        moments = read_moments(reader, source, 0, source.samples.rows, bucket)
        again = read_moments(reader, source, 20_480, source.samples.rows, bucket)
    assert len(moments) == -(-40_000 // bucket)
    for moment in moments:
        assert moment.parts is not None
        assert sum(moment.parts.values()) == 16 * GIB
        assert moment.parts["elsewhere"] == pytest.approx(1 * GIB, rel=0.1)
    assert again == moments[20_480 // bucket :]


def test_a_recording_of_the_machine_has_no_process_of_its_own(tmp_path: Path) -> None:
    rows = [sample(tick, process__rss=100) for tick in range(20)]
    write_run(tmp_path, gpu=GPU, samples=rows, devices=[device(tick) for tick in range(20)])
    assert parts(found(tmp_path)[-1]) == {"free": 10240 - 2000, "used": 2000}


def test_the_place_is_that_of_the_gpu_where_there_is_one(tmp_path: Path) -> None:
    write_run(tmp_path, gpu=GPU, samples=[process(0)], devices=[device(0)])
    with StoreReader(tmp_path) as reader:
        on_gpu, on_host = (ledger_source(reader.series(), gpu) for gpu in (GPU, None))
    assert on_gpu is not None
    assert on_host is not None
    assert (on_gpu.place, on_host.place) == (MemoryDomain.DEVICE, MemoryDomain.HOST)
    assert (on_gpu.device is not None, on_host.device) == (True, None)
