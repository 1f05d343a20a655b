"""The predicted peak: by hand for a small model, the allocator's rules, margin, largest batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.train_devices import SIMULATED
from trainer.config import Optimizer, RunConfig, Runner, Strategy, Workload, defaults
from trainer.config_validation import TrainDevice
from trainer.error_messages import RunFailedError
from trainer.memory_estimate.allocator import (
    EMPTY_CACHE,
    WAITING,
    AllocationCategory,
    AllocationEvent,
    CachingAllocator,
    PeakMemory,
    backward_reorders,
    cublas_workspace,
    forward_reorders,
    peak_memory,
    rounded,
    segment_size,
)
from trainer.memory_estimate.batch_size_finder import Point, curve, explore, sizes_to_measure
from trainer.memory_estimate.estimate import (
    FreeMemory,
    MemoryEstimate,
    answer,
    compare_with_free,
    estimate_memory,
)
from trainer.memory_estimate.simulate import simulate_step
from trainer.workloads import WORKLOADS
from trainer.workloads.task import Task, TensorSplit

MIB = 2**20
CPU = TrainDevice(id="cpu", name="a CPU", memory_total=2**34)
GPU = TrainDevice(
    id="GPU-1", name="a GPU", memory_total=2**36, cuda_index=0, compute_capability=(9, 0)
)
WIDTH, BATCH = 64, 1024
WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """Linear(64, 64) with Adam, 1,024 samples a batch: all sizes can be added up by hand."""

    def task(config: RunConfig) -> Task:
        data = torch.zeros(2 * BATCH, WIDTH)
        split = TensorSplit.of(data, data)
        layer = nn.Linear(WIDTH, WIDTH)
        return Task(model=layer, train=split, validation=split, loss=nn.MSELoss(), classifies=False)

    monkeypatch.setitem(WORKLOADS, Workload.LINEAR, task)
    yield replace(defaults(Workload.LINEAR), batch_size=BATCH, optimizer=Optimizer.ADAM)
    gc.collect()


# --- the parts of a model that can be added up ----------------------------------------------------


def test_a_linear_layer_with_adam_is_what_can_be_added_up_by_hand(one_layer: RunConfig) -> None:
    peak = estimate_memory(one_layer, CPU).peak
    parts = peak.parts
    assert (sum(parts.values()), peak.reserved) == (peak.allocated, None)
    assert parts["parameters"] == WEIGHTS
    # Two moments, and a counter of four bytes for each of the two parameters.
    assert parts["optimizer_state"] == 2 * WEIGHTS + 2 * 4
    # The order of the epoch, the generator's state, and one batch with its targets.
    assert parts["inputs"] == 8 * 2 * BATCH + 5056 + 2 * 4 * BATCH * WIDTH
    # The peak is in the validation, which still holds the outputs and the loss of the batch before;
    # and the squared differences, twice, before their mean.
    assert parts["activations"] == 2 * (4 * BATCH * WIDTH + 4)
    assert parts["workspace"] == 2 * 4 * BATCH * WIDTH
    assert parts["gradients"] == parts["temporary"] == 0
    sgd = estimate_memory(replace(one_layer, optimizer=Optimizer.SGD), CPU).peak.parts
    assert sgd["optimizer_state"] == WEIGHTS


def test_gradients_stay_where_they_are_filled_with_zeros(one_layer: RunConfig) -> None:
    apply, attend = nn.Module._apply, nn.functional.scaled_dot_product_attention
    for changes, size in (({}, 0), ({"set_to_none": False}, WEIGHTS)):
        step = simulate_step(replace(one_layer, **changes), None)
        gradients = AllocationCategory.GRADIENTS
        sizes = [one.size for one in step.events if step.parts[one.number] is gradients]
        assert sum(sizes) == size
    # And torch is unchanged afterwards.
    assert nn.Module._apply is apply
    assert nn.functional.scaled_dot_product_attention is attend
    layer = nn.Linear(2, 2)
    assert type(layer.weight) is nn.Parameter
    assert layer(torch.ones(1, 2)).shape == (1, 2)


def test_accumulation_takes_less_than_one_large_batch_and_checkpointing_less_than_none() -> None:
    base = replace(defaults(Workload.GPT), width=32, num_layers=4, context_length=32)

    def peak(**changes: Any) -> PeakMemory:
        return estimate_memory(replace(base, **changes), CPU).peak

    whole = peak(batch_size=32)
    parts = peak(batch_size=8, gradient_accumulation_steps=4)
    again = peak(batch_size=32, activation_checkpointing=True)
    assert parts.allocated < 0.5 * whole.allocated
    assert again.allocated < 0.8 * whole.allocated


def test_a_model_that_reads_weights(monkeypatch: pytest.MonkeyPatch, one_layer: RunConfig) -> None:
    task = WORKLOADS[Workload.LINEAR]

    def reads(config: RunConfig) -> Task:
        made = task(config)
        assert float(next(made.model.parameters()).sum()) != 12.5
        return made

    expected = estimate_memory(one_layer, CPU).peak
    monkeypatch.setitem(WORKLOADS, Workload.LINEAR, reads)
    assert estimate_memory(one_layer, CPU).peak == expected


# --- an absent GPU --------------------------------------------------------------------------------


def test_a_gpu_has_workspace_and_rounding(
    one_layer: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = estimate_memory(replace(one_layer, device=GPU.id), GPU)
    assert found.peak.parts["workspace"] == 2 * 32 * MIB, "one of each thread"
    assert 0 < found.peak.parts["rounding"] < 20 * 512
    assert found.peak.reserved is not None
    assert found.peak.reserved >= found.peak.allocated
    assert found.outside == {"context": 512 * MIB}
    assert cublas_workspace(one_layer, (8, 0)) == 8_519_680
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert cublas_workspace(one_layer, (9, 0)) == 8_519_680


# --- the allocator --------------------------------------------------------------------------------


def test_sizes_and_segments_are_those_of_torchs_allocator() -> None:
    assert [rounded(size) for size in (1, 512, 513)] == [512, 512, 1024]
    segments = {MIB: 2, MIB + 512: 20, 10 * MIB: 10, 11 * MIB: 12}
    assert {size: segment_size(size) // MIB for size in segments} == segments


def test_a_freed_block_is_used_again_and_neighbors_join() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(8 * MIB), allocator.allocate(14 * MIB)
    assert (allocator.allocated, allocator.reserved) == (22 * MIB, 34 * MIB)
    allocator.release(first)
    third = allocator.allocate(6 * MIB)
    assert allocator.reserved == 34 * MIB
    for block in (second, third):
        allocator.release(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 34 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator = CachingAllocator()  # a rest of a mebibyte is not split off
    allocator.release(allocator.allocate(11 * MIB))
    allocator.allocate(11 * MIB)
    assert allocator.allocated == 12 * MIB


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_all_that_is_taken_can_be_given_back(steps: list[tuple[int, bool]]) -> None:
    allocator, held = CachingAllocator(), []
    for size, gives_back in steps:
        block = allocator.allocate(size)
        assert block.size >= size
        held.append(block)
        if gives_back:
            allocator.release(held.pop(0))
        assert sum(one.size for one in held) == allocator.allocated <= allocator.reserved
    for block in held:
        allocator.release(block)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


# --- the peak -------------------------------------------------------------------------------------

PARTS = {
    0: AllocationCategory.PARAMETERS,
    1: AllocationCategory.ACTIVATIONS,
    2: AllocationCategory.INPUTS,
}


def test_the_peak_has_the_parts_of_its_own_moment() -> None:
    sizes = ((0, 100), (1, 1000), (1, -1000), (2, 500))
    events = [AllocationEvent(number, size) for number, size in sizes]
    peak = peak_memory(events, PARTS, on_gpu=False)
    assert peak.allocated == 1100
    assert (peak.parts["activations"], peak.parts["inputs"]) == (1000, 0)
    rounded_up = peak_memory(events, PARTS, on_gpu=True)
    assert rounded_up.allocated == 512 + 1024
    assert rounded_up.parts["rounding"] == 512 + 1024 - 1100


def test_memory_that_waits_for_a_copy_or_was_freed_is_reserved() -> None:
    waiting = [AllocationEvent(0, 4 * MIB), AllocationEvent(2, 30 * MIB, WAITING)]
    peak = peak_memory(waiting, PARTS, on_gpu=True)
    assert (peak.allocated, peak.reserved) == (4 * MIB, 50 * MIB)
    freed = [AllocationEvent(1, 30 * MIB), AllocationEvent(1, -30 * MIB)]
    after = [AllocationEvent(EMPTY_CACHE, 0), AllocationEvent(2, 40 * MIB)]
    assert peak_memory([*freed, *after], PARTS, on_gpu=True).reserved == 40 * MIB


def test_convolutions_reorder_weights_and_inputs_that_lie_otherwise() -> None:
    inputs, weights = torch.empty(2, 8, 16, 16), torch.empty(8, 8, 3, 3)
    assert forward_reorders(inputs, weights, inputs) == inputs.nbytes + weights.nbytes
    last = inputs.to(memory_format=torch.channels_last)
    assert forward_reorders(last, weights, last) == weights.nbytes
    assert backward_reorders(last, last, weights) == 2 * weights.nbytes


# --- the margin and the verdict -------------------------------------------------------------------


def prediction(size: int) -> MemoryEstimate:
    return MemoryEstimate(
        peak=PeakMemory(size, {"parameters": size}),
        outside={"data_set": 10},
        samples=100,
    )


@pytest.mark.parametrize(
    ("free", "fits", "said"),
    [
        (2000, True, "Needs 1.08"),
        (1050, None, "is free. Use a smaller batch."),
        (900, False, "Use a smaller batch"),
        (None, None, "nobody knows"),
    ],
)
def test_the_verdict_has_three_answers(free: int | None, fits: bool | None, said: str) -> None:
    verdict = compare_with_free(prediction(1000), FreeMemory(free, None, "nobody knows"))
    assert verdict["fits"] is fits
    assert said in verdict["reason"]
    assert verdict["needed_bytes"] == 1110


# --- the largest batch ----------------------------------------------------------------------------


def test_the_limit_is_found_within_a_sixteenth_an_epoch_or_four_times_the_size() -> None:
    def largest(free: int | None, samples: int = 10**9) -> int:
        points = explore(lambda size: (100 * size, 110 * size, samples), 8, free)
        sizes = [point.batch_size for point in points]
        assert sizes == sorted(sizes)
        return max(size for size in sizes if free is None or 110 * size <= 0.9 * free)

    assert 900 - 900 / 16 <= largest(110_000) <= 900
    assert largest(10**9, samples=100) == 100
    assert largest(None) == 32
    assert curve(POINTS, None, {})["recommended"] is None


POINTS = [Point(size, 100 * size, 110 * size) for size in (1, 64, 128, 256, 1024)]


def test_recommended_is_the_smallest_that_is_shown_to_be_nearly_the_fastest() -> None:
    rates = {64: [900.0, 905, 903], 128: [985.0, 982, 988], 256: [1000.0, 1003, 998]}
    found = curve(POINTS, 60_000, rates | {1024: [2000.0, 2000, 2000]})
    assert (found["largest"], found["recommended"]) == (256, 128)
    assert "3 runs each" in found["why"]
    assert curve(POINTS, 60_000, {})["recommended"] is None
    assert curve(POINTS, 60_000, {64: [1.0], 128: [1.0]})["recommended"] is None
    assert curve(POINTS, 10, rates)["largest"] is None


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_one_outlier_recommends_no_smaller_batch(size: int, factor: float) -> None:
    rates = {64: [500.0, 503, 498], 128: [800.0, 803, 797], 256: [1000.0, 1003, 998]}
    rates[size][1] *= factor
    assert curve(POINTS, 60_000, rates)["recommended"] == 256


def test_a_flat_curve_recommends_the_smallest_batch_with_noise() -> None:
    generator = np.random.default_rng(0)
    chosen = [
        curve(
            POINTS, 60_000, dict(zip((64, 128, 256), generator.normal(100, 1, (3, 3)), strict=True))
        )
        for _ in range(100)
    ]
    assert sum(one["recommended"] == 64 for one in chosen) >= 75


def test_the_reason_names_the_limit() -> None:
    assert "of this dataset" in curve(POINTS, 10**9, {})["why"]
    assert "leaves 10% of the free memory" in curve(POINTS, 60_000, {})["why"]
    # Only sizes with headroom are measured.
    points = [Point(size, 100 * size, 110 * size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 120)]
    assert sizes_to_measure(points, 110 * 100) == [4, 8, 16, 32, 64]


def test_a_simulated_gpu_has_a_largest_batch_without_a_speed(
    one_layer: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = FreeMemory(2**30, 2**31)
    monkeypatch.setattr("trainer.memory_estimate.estimate.free_memory", lambda device: free)
    monkeypatch.setattr(
        "trainer.memory_estimate.estimate.measure",
        lambda config, sizes, progress: ({size: [9.0, 9.0] for size in sizes}, []),
    )
    for gpu, is_timed in ((GPU, True), (SIMULATED, False)):
        found = answer(replace(one_layer, device=gpu.id), gpu, largest=True, probe=True)["largest"]
        assert found["largest"] > 0
        assert (found["recommended"] is not None) is is_timed
        assert ("simulated" in " ".join(found["not_measured"])) is not is_timed


# --- several devices ------------------------------------------------------------------------------


def test_each_rank_of_ddp_has_buckets_as_large_as_its_weights(one_layer: RunConfig) -> None:
    ddp = replace(one_layer, strategy=Strategy.DDP, runner=Runner.TORCHRUN, devices_per_node=3)
    alone = estimate_memory(replace(one_layer, device=GPU.id), GPU)
    each = estimate_memory(replace(ddp, device=GPU.id), GPU)
    assert each.peak == alone.peak
    assert each.outside == alone.outside | {"gradient_buckets": WEIGHTS}
    assert any("NCCL" in note for note in each.notes)


def test_ranks_on_a_cpu_share_the_hosts_memory(one_layer: RunConfig) -> None:
    ddp = replace(one_layer, strategy=Strategy.DDP, runner=Runner.TORCHRUN, devices_per_node=3)
    outside = estimate_memory(ddp, CPU).outside
    others = outside.pop("other_ranks")
    assert others == 2 * (estimate_memory(ddp, CPU).peak.allocated + sum(outside.values()))
    assert "other_ranks" not in estimate_memory(replace(ddp, devices_per_node=1), CPU).outside


@pytest.mark.parametrize("parallel", [Strategy.FSDP, Strategy.DP])
def test_what_is_not_predicted_is_refused(one_layer: RunConfig, parallel: Strategy) -> None:
    with pytest.raises(RunFailedError, match="^strategy: .*not predicted"):
        estimate_memory(replace(one_layer, strategy=parallel), CPU)
