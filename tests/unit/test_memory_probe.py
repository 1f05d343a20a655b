"""The headroom that a script's first steps give, and the search for the maximum batch size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.host.usage import CgroupMemory
from stepscope.watch import memory_probe
from stepscope.watch.memory_probe import (
    StepMemory,
    UsedMemory,
    batch_headroom,
    free_memory,
    largest_step,
)
from trainer.config import RunConfig, Runner, Strategy
from trainer.memory_estimate import ProbeError, probe_problem
from trainer.memory_estimate.batch_size import MAX_STEP_S, find_batch_sizes, recommended_size

GIB = 2**30
STEP = StepMemory(
    cuda_index=0,
    used=UsedMemory(now=GIB, peak=3 * GIB, reserved=3 * GIB, peak_reserved=3 * GIB),
    free=9 * GIB,
    parameters=GIB // 4,
    gradients=GIB // 4,
    state=GIB // 2,
)


def used(step: StepMemory, **changes: int | None) -> StepMemory:
    return replace(step, used=replace(step.used, **changes))


FIRST = used(replace(STEP, state=0), peak=20 * GIB)
ON_HOST = replace(used(STEP, reserved=None, peak_reserved=None), cuda_index=None, base=GIB)


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        # Of 12 GiB 10% stay free and 1 GiB is fixed: 9.8 GiB for the 2 GiB that grow.
        (STEP, 4.9),
        # The allocator reserves twice what it allocates.
        (used(replace(STEP, free=6 * GIB), reserved=6 * GIB, peak_reserved=6 * GIB), 2.2),
        # It has returned its cache, which counts as free memory.
        (used(replace(STEP, free=11 * GIB), reserved=GIB), 4.9),
    ],
)
def test_the_factor_leaves_a_tenth_free(step: StepMemory, factor: float) -> None:
    steps = [FIRST, step, step]
    assert batch_headroom(steps)[0] == pytest.approx(factor)
    largest = largest_step(steps)
    assert largest.available == 12 * GIB
    assert largest.parts()["activations_and_the_rest"] == 2 * GIB


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([STEP], "two steps"),
        ([STEP, used(STEP, peak=GIB + 1000)], "besides the weights"),
        ([STEP, replace(STEP, free=0)], "less than 10% free"),
        ([STEP, ON_HOST], "of a GPU"),
    ],
)
def test_incomparable_steps_give_no_factor(steps: list[StepMemory], reason: str) -> None:
    factor, text = batch_headroom(steps)
    assert factor is None
    assert reason in text


def test_memory_of_a_host_counts_the_process_and_ends_at_the_limit_of_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ON_HOST.available == 9 * GIB + GIB + GIB
    held = CgroupMemory(limit=GIB, used=GIB - 4096)
    monkeypatch.setattr(memory_probe, "container", lambda: held)
    assert free_memory(None) == 4096


# --- the maximum batch size -----------------------------------------------------------------------


def probe(size: int, **changes: Any) -> dict[str, Any]:
    """Return a probe on a device of 1,000 bytes: a byte a sample, and 100 samples/s at most."""
    return {
        "batch_size": size,
        "fits": size <= 1000,
        "reason": None,
        "samples": 10**6,
        "step_s": 0.01,
        "measured_peak_bytes": size,
        "measured_reserved_bytes": size,
        "free_bytes": 1000 - size,
        "samples_per_sec": min(100.0, 1.0 * size),
        **changes,
    }


@pytest.mark.parametrize(
    ("settings", "changes", "sizes", "largest"),
    [
        # Doubled until it fails, then bisected.
        ({"batch_size": 100}, {}, [100, 200, 400, 800, 1000, 1100, 1200, 1600], 1000),
        # The configured size does not fit.
        ({"batch_size": 4000}, {}, [1000, 1125, 1250, 1500, 2000, 4000], 1000),
        ({"batch_size": 2}, {"fits": False}, [1, 2], None),
        # An epoch has no larger batch, here of four micro-batches.
        ({"batch_size": 32, "gradient_accumulation_steps": 4}, {"samples": 200}, [32, 50], 50),
        # The next step would take too long.
        ({"batch_size": 64}, {"step_s": 0.6 * MAX_STEP_S}, [64], 64),
    ],
)
def test_the_search_ends_at_the_limit(
    settings: dict[str, int], changes: dict[str, Any], sizes: list[int], largest: int | None
) -> None:
    asked: list[int] = []

    def measure(size: int) -> dict[str, Any]:
        asked.append(size)
        return probe(size, **changes)

    found = find_batch_sizes(RunConfig(**settings), measure)  # type: ignore[arg-type]
    assert [point["batch_size"] for point in found["points"]] == sizes
    assert len(asked) == len(set(asked))
    assert found["largest"] == largest


def test_a_failed_probe_ends_the_search_with_its_reason() -> None:
    def measure(size: int) -> dict[str, Any]:
        if size > 128:
            raise ProbeError("it crashed.")
        return probe(size)

    found = find_batch_sizes(RunConfig(batch_size=128), measure)
    assert (found["largest"], found["recommended"]) == (128, 128)
    assert "it crashed." in found["why"]


@pytest.mark.parametrize(
    ("probes", "size"),
    [
        ([probe(50), probe(100), probe(200), probe(800)], 100),  # the knee
        ([probe(96), probe(100)], 96),  # at most 5% slower
        # Neither the size that leaves less than a tenth free nor the one that fails.
        ([probe(40), probe(950, samples_per_sec=900.0), probe(1001)], 40),
        ([probe(50, samples_per_sec=None), probe(100, samples_per_sec=None)], None),
        # On a CPU the peak counts, as nothing is reserved.
        ([probe(50, measured_reserved_bytes=None)], 50),
    ],
)
def test_the_knee_of_the_throughput_is_recommended(
    probes: list[dict[str, Any]], size: int | None
) -> None:
    assert recommended_size(probes)[0] == size


def test_a_job_of_several_ranks_is_not_measured() -> None:
    assert probe_problem(RunConfig(strategy=Strategy.DP, devices_per_node=2)) is None
    assert probe_problem(RunConfig(strategy=Strategy.DDP, runner=Runner.TORCHRUN)) is not None
