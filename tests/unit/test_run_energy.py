"""The energy of a run from its records of the driver's counter, also per sample."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard.machine.run_energy import RunEnergies, run_energy, trains_on
from stepscope.run import RunInfo, RunStatus
from stepscope.run.folder import user_name
from stepscope.store import STORE_NAME, SeriesBlock, StoreWriter
from tests.support.fake_machine import FakeClock

UUID = "GPU-00000000-0000-4000-8000-000000000000"
"""The GPU that the runs here train on."""
Values = Callable[[np.ndarray[Any, Any]], dict[str, Any]]


def run(folder: Path, **run_json: Any) -> RunInfo:
    own = {"host": socket.gethostname(), "user": user_name(), "pid": os.getpid(), "created": 0.0}
    told = own | {"kind": "watch", "device": UUID} | run_json
    return RunInfo(folder, RunStatus.RUNNING, None, 0.0, told)


def record(folder: Path, stream: str, source: str, ts: Any, **columns: Any) -> None:
    """Add rows to a store; a value that is NaN is missing."""
    writer = StoreWriter(folder / STORE_NAME, reopen=(folder / STORE_NAME).exists())
    ts = np.asarray(ts, dtype=float)
    keys = [name.replace("__", "/") for name in columns]
    table = np.vstack(
        [np.broadcast_to(np.asarray(v, dtype=float), ts.shape) for v in columns.values()]
    )
    with writer.transaction():
        writer.append(
            stream, source, SeriesBlock.raw(keys, ts, np.arange(len(ts), dtype=float), table)
        )
    writer.close()


@pytest.mark.parametrize("rows", [30, 511, 512, 513, 20_000])
def test_it_is_the_counters_difference_whatever_the_length(tmp_path: Path, rows: int) -> None:
    ts = 100 + np.arange(rows) / 10
    record(tmp_path, "devices", UUID, ts, gpu__energy=5000 + 40.0 * np.arange(rows))
    energy = run_energy(run(tmp_path), UUID)
    assert energy is not None
    assert energy.joules == pytest.approx(40.0 * (rows - 1))
    assert energy.seconds == pytest.approx((rows - 1) / 10)


def test_a_counter_that_fell_does_not_count_backwards(tmp_path: Path) -> None:
    counter = [*np.arange(100.0, 200.0, 5.0), *np.arange(0.0, 100.0, 5.0)]
    record(tmp_path, "devices", UUID, np.arange(40.0), gpu__energy=counter)
    energy = run_energy(run(tmp_path), UUID)
    assert energy is not None
    assert energy.joules == 190.0


def test_the_samples_are_those_of_all_steps(tmp_path: Path) -> None:
    record(tmp_path, "devices", UUID, np.arange(100.0), gpu__energy=80.0 * np.arange(100))
    steps = np.arange(6000)
    seconds = np.where(steps % 2, 0.3, 0.1)
    rates = {"perf__samples_per_sec": 64 / seconds, "perf__step_time": seconds}
    record(tmp_path, "steps", "", np.cumsum(seconds), **rates)
    energy = run_energy(run(tmp_path), UUID)
    assert energy is not None
    assert energy.samples == pytest.approx(64 * 6000)
    assert energy.text == "7.92 kJ (2.20 Wh) in 1 min 39 s, 0.0206 J/sample"
    ranks = run_energy(run(tmp_path, world_size=2), UUID)
    assert ranks is not None
    assert ranks.samples is None, "the other ranks' samples are in other stores"


def test_too_short_a_run_and_one_without_values_have_none(tmp_path: Path) -> None:
    assert run_energy(run(tmp_path), UUID) is None, "no store yet"
    record(tmp_path, "devices", UUID, [0.0, 1.9], gpu__energy=[0.0, 10.0])
    assert run_energy(run(tmp_path), UUID) is None
    record(tmp_path, "devices", "GPU-other", [0.0, 60.0], gpu__power=[100.0, 100.0])
    assert run_energy(run(tmp_path), "GPU-other") is None
    assert run_energy(run(tmp_path), "GPU-unknown") is None


def test_a_damaged_store_has_none(tmp_path: Path) -> None:
    (tmp_path / STORE_NAME).write_bytes(b"x" * 5000)
    assert run_energy(run(tmp_path), UUID) is None


def test_only_a_live_run_of_this_machine_counts(tmp_path: Path) -> None:
    assert trains_on(run(tmp_path), UUID)
    assert not trains_on(run(tmp_path), "GPU-other")
    assert not trains_on(run(tmp_path, host="node7"), UUID)
    assert not trains_on(run(tmp_path, device="cpu"), "cpu")
    ended = RunInfo(tmp_path, RunStatus.FINISHED, None, 0.0, run(tmp_path).run_json)
    assert not trains_on(ended, UUID)


def test_it_is_read_every_five_seconds_for_all_tabs(tmp_path: Path) -> None:
    clock = FakeClock()
    energies = RunEnergies(clock)
    live = run(tmp_path)
    assert energies.of([live], UUID) is None
    record(tmp_path, "devices", UUID, [0.0, 10.0], gpu__energy=[0.0, 500.0])
    clock.now += 4
    assert energies.of([live], UUID) is None
    clock.now += 2
    found = energies.of([live], UUID)
    assert found is not None
    assert (found.run_id, found.joules) == (tmp_path.name, 500.0)
    clock.now += 6
    assert energies.of([], UUID) is None
