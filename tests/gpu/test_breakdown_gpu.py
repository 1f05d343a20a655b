"""The memory breakdown with real numbers of torch's allocator and of the driver."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepscope.distributed.rendezvous import find_place
from stepscope.memory.breakdown_series import (
    BreakdownReading,
    breakdown_source,
    newest_breakdown,
    peaks,
    read_breakdown,
)
from stepscope.run import RunKind, RunStatus, read_run
from stepscope.run_setup import training_gpu
from stepscope.session.script_session import ScriptSession
from stepscope.store import StoreReader
from tests.support.run_values import metric, run_json
from trainer.config import Workload, defaults
from trainer.runners.training_run import run as train
from trainer.training.devices import list_devices

MIB = 2**20
BLOCK = 256 * MIB
SETTLES_S = 2.5
"""Time after which every value was read again: the slowest once a second."""


def readings(folder: Path) -> list[BreakdownReading]:
    """Every known breakdown of a run."""
    with StoreReader(folder) as reader:
        source = breakdown_source(reader.series(), training_gpu(read_run(folder).run_json))
        assert source is not None
        found = read_breakdown(reader, source, source.samples.rows)
    return [reading for reading in found if reading.categories is not None]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ScriptSession]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.zeros(1, device="cuda")
    live = ScriptSession(
        find_place(tmp_path, "breakdown", {}), name="breakdown", kind=RunKind.WATCH
    )
    live.train_on(0)
    yield live
    live.close(RunStatus.FINISHED)
    torch.cuda.empty_cache()


def settled(live: ScriptSession) -> dict[str, int]:
    """The parts once every value was read again, with boundaries as a loop has them."""
    until = time.monotonic() + SETTLES_S
    while time.monotonic() < until:
        live.boundary()
        time.sleep(0.02)
    folder = live.recorder.folder
    deadline = time.monotonic() + 10
    while True:  # the writer is a little behind
        with StoreReader(folder) as reader:
            source = breakdown_source(reader.series(), training_gpu(read_run(folder).run_json))
            newest = None if source is None else newest_breakdown(reader, source)
        if newest is not None and newest.categories is not None:
            return newest.categories
        assert time.monotonic() < deadline
        live.boundary()
        time.sleep(0.05)


def tensors(parts: dict[str, int]) -> int:
    """What is allocated, with model states or without."""
    states = ("parameters", "gradients", "optimizer_state")
    return parts["activations"] + sum(parts.get(key, 0) for key in states)


def test_the_parts_of_a_training_sum_to_the_device(tmp_path: Path) -> None:
    device = next(device for device in list_devices() if device.cuda_index == 0)
    config = replace(defaults(Workload.DIGITS_MLP, device.id), epochs=60, max_steps=1500)
    assert train(config, tmp_path) is RunStatus.FINISHED, run_json(tmp_path)["reason"]
    found = readings(tmp_path)
    [total] = set(metric(tmp_path, "gpu/mem_total", "devices"))
    whole = [one.categories for one in found if one.categories and "free" in one.categories]
    assert len(whole) > 5
    assert {sum(parts.values()) for parts in whole} == {int(total)}
    assert min(size for parts in whole for size in parts.values()) >= 0
    last = whole[-1]
    weights = 4 * run_json(tmp_path)["parameters"]
    assert last["parameters"] == weights
    assert 2 * weights <= last["optimizer_state"] <= 2 * weights + 4096
    allocated = metric(tmp_path, "memory/allocated", "samples")
    assert tensors(last) in set(allocated.astype(int))
    with StoreReader(tmp_path) as reader:
        source = breakdown_source(reader.series(), device.id)
        assert source is not None
        found_peaks = peaks(reader, source)
    assert found_peaks["allocated"] >= allocated.max()
    assert found_peaks["reserved"] >= metric(tmp_path, "memory/reserved", "samples").max()


def test_a_block_is_seen_where_it_goes(live: ScriptSession) -> None:
    before = settled(live)
    block = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    holding = settled(live)
    assert tensors(holding) - tensors(before) == BLOCK
    assert before["free"] - holding["free"] >= BLOCK
    del block
    freed = settled(live)
    assert tensors(freed) == tensors(before)
    assert freed["cached"] - holding["cached"] == BLOCK
    assert abs(freed["free"] - holding["free"]) < BLOCK / 4  # others may come and go
    torch.cuda.empty_cache()
    returned = settled(live)
    assert returned["cached"] <= before["cached"]
    assert returned["free"] - freed["free"] >= BLOCK / 2
