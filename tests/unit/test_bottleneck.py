"""The verdict on a run's steps: every kind, what it abstains from, and what it proposes.

The numbers of CPU runs are recorded (tests/data/recorded); those of GPU runs are made up by hand.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stepscope.diagnosis.classify import (
    DATA_WAIT,
    EXPLAINED,
    STANDS_STILL,
    parts_of,
)
from stepscope.diagnosis.recommendations import next_to_try
from stepscope.diagnosis.results import (
    MIN_STEPS,
    BottleneckKind,
    StepAverages,
    StepBreakdown,
)
from stepscope.run_setup import RunSetup, setup_of
from tests.support.step_verdict import verdict
from trainer.config import RunConfig


def gpu(config: dict[str, Any] | None = None, **more: Any) -> RunSetup:
    """One of our runs on an Ampere GPU, with pinned and non-blocking copies."""
    base = RunConfig(pin_memory=True, non_blocking=True).to_dict()
    more = {"on_gpu": True, "own": True, "cores": 16, "capability": (8, 0)} | more
    return RunSetup(config=base | (config or {}), **more)


CPU = RunSetup(on_gpu=False, own=True, config=RunConfig().to_dict(), cores=8, step_time=0.1)
SCRIPT = RunSetup(on_gpu=True, own=False, cores=16)


def figures(**more: Any) -> StepAverages:
    """A step of 100 ms on a GPU that computes for 95 of them, unless told otherwise."""
    plain: dict[str, Any] = {
        "steps": 200,
        "step_time": 0.1,
        "data_wait": 0.001,
        "copies": 0.001,
        "device_time": 0.095,
        "utilization": 0.96,
    }
    return StepAverages(**plain | more)


def on_cpu(data_wait: float | None, **more: Any) -> StepAverages:
    return StepAverages(steps=100, step_time=0.1, data_wait=data_wait, **more)


AHEAD = figures(utilization=None, gpu_wait=0.06)
"""As with MIG, where NVML has no utilization; between a step's events there may be gaps."""
COPY_STREAM = gpu({"copy_stream": True})
BLOCKING = gpu({"pin_memory": False, "non_blocking": False})
INPUT, COMPUTE, UNCLEAR = BottleneckKind.INPUT, BottleneckKind.COMPUTE, BottleneckKind.UNCLEAR
TRANSFER, LAUNCH = BottleneckKind.TRANSFER, BottleneckKind.LAUNCH


@pytest.mark.parametrize(
    ("given", "setup", "kind"),
    [
        (figures(data_wait=0.06), gpu(), COMPUTE),  # the wait is behind a busy GPU
        (
            figures(data_wait=0.06, copies=0.03, device_time=0.04, utilization=0.4),
            COPY_STREAM,
            INPUT,
        ),
        (figures(copies=None, utilization=0.4), gpu(), UNCLEAR),  # gaps may be copies
        (figures(device_time=0.078), gpu(), UNCLEAR),
        (figures(device_time=None, utilization=0.4), gpu(), LAUNCH),
        (figures(data_wait=None), SCRIPT, UNCLEAR),
        (figures(data_wait=0.065, copies=0.06, device_time=0.035), BLOCKING, TRANSFER),
        (figures(data_wait=0.05, copies=0.04, device_time=0.055, utilization=0.6), gpu(), TRANSFER),
        (figures(data_wait=0.06, device_time=0.035, throttled=1.0), gpu(), INPUT),
        (AHEAD, gpu(), COMPUTE),
        (replace(AHEAD, gpu_wait=0.0), gpu(), UNCLEAR),
        (replace(AHEAD, device_time=0.03, data_wait=0.066), gpu(), INPUT),
        (on_cpu(0.019, process_cpu=1.0), CPU, COMPUTE),
        (on_cpu(0.026, process_cpu=1.0), CPU, INPUT),
        (on_cpu(0.024, process_cpu=1.0, computing=0.07), CPU, UNCLEAR),
        (replace(on_cpu(0.026, process_cpu=1.0), steps=MIN_STEPS), CPU, UNCLEAR),  # 0.5 s in all
        (on_cpu(0.01, computing=0.085), CPU, COMPUTE),
        # Without CPU time: in less than a second of steps it may as well have slept.
        (on_cpu(0.0), CPU, UNCLEAR),
        (on_cpu(0.01, process_cpu=0.2, host_cpu=None), CPU, UNCLEAR),
        (on_cpu(0.01, process_cpu=0.2, host_cpu=0.8), CPU, UNCLEAR),  # it may have slept
        (on_cpu(0.01, process_cpu=0.2, host_cpu=0.99), CPU, UNCLEAR),  # only the kernel knows
    ],
)
def test_the_kind_of_a_verdict(given: StepAverages, setup: RunSetup, kind: BottleneckKind) -> None:
    assert verdict(given, setup).kind is kind


def test_a_gpu_of_a_job_may_wait_for_other_ranks_where_it_is_busy() -> None:
    """Their wait is a kernel of NCCL; a faster step of this rank would not shorten it."""
    assert verdict(figures(), gpu()).next is not None
    found = verdict(figures(), replace(gpu(), world_size=2))
    assert (found.kind, found.next) == (COMPUTE, None)


def test_the_host_s_wait_for_a_copy_is_counted_once() -> None:
    """The loop waits 40 ms for a batch, 30 of them because the copy blocks it."""
    given = figures(data_wait=0.04, copies=0.03, device_time=0.03, utilization=0.3)
    parts = parts_of(given, BLOCKING)
    assert isinstance(parts, StepBreakdown)
    assert (parts.data, parts.copies) == (pytest.approx(0.1), pytest.approx(0.3))
    ahead = parts_of(given, gpu())
    assert isinstance(ahead, StepBreakdown)
    assert ahead.data == pytest.approx(0.4)


def test_a_busy_gpu_with_a_lowered_clock_is_throttled() -> None:
    hot = {"throttle_words": ("hardware thermal slowdown",), "sm_clock": 1200.0}
    found = verdict(figures(throttled=0.97, sm_clock_max=1980.0, **hot), gpu())
    assert found.kind == "throttled"
    assert verdict(figures(throttled=0.3, **hot), gpu()).kind == "compute-bound"


def test_a_young_run_says_how_many_steps_are_missing() -> None:
    found = verdict(figures(steps=MIN_STEPS - 1), gpu())
    assert found.kind is BottleneckKind.TOO_YOUNG
    assert "1 more step is needed" in found.text
    assert verdict(figures(steps=MIN_STEPS), gpu()).kind.names_a_cause


@pytest.mark.parametrize(
    "setup", [gpu(), gpu({"copy_stream": True}), gpu({"pin_memory": False}), CPU]
)
def test_parts_always_sum_to_the_step_and_a_named_cause_explains_enough(setup: RunSetup) -> None:
    draw = random.Random(0)

    def some(high: float) -> float | None:
        return None if draw.random() < 0.15 else draw.uniform(0, high)

    for _ in range(3000):
        given = StepAverages(
            steps=draw.randrange(MIN_STEPS, 512),
            step_time=0.1,
            data_wait=some(0.12),
            copies=some(0.12),
            device_time=some(0.13),
            utilization=some(1.0),
            gpu_wait=some(0.1),
            process_cpu=some(3.0),
            host_cpu=some(1.0),
            throttled=some(1.0),
        )
        parts = parts_of(given, setup)
        found = verdict(given, setup)
        if isinstance(parts, str):
            assert found.kind is BottleneckKind.UNCLEAR
            continue
        each = (parts.compute, parts.data, parts.copies, parts.other)
        assert sum(each) == pytest.approx(1)
        assert all(-1e-9 <= part <= 1 for part in each)
        assert (found.share is not None) == found.kind.names_a_cause == (found.next is not None)
        least = DATA_WAIT if setup is CPU and found.kind is INPUT else EXPLAINED
        if found.share is not None:
            assert least - 1e-9 <= found.share <= 1 + 1e-9
        if setup.on_gpu and found.kind in (
            BottleneckKind.INPUT,
            BottleneckKind.TRANSFER,
            BottleneckKind.LAUNCH,
        ):
            assert parts.idle > STANDS_STILL


# --- what to try next --------------------------------------------------------------------------

SHOWN = {
    "input-bound": figures(data_wait=0.06, device_time=0.038),
    "transfer-bound": figures(data_wait=0.0, copies=0.06, device_time=0.039),
    "launch-bound": figures(utilization=0.4),
    "compute-bound": figures(),
}
FOUR = {"num_workers": 4, "persistent_workers": False}
COPIES = ("pin_memory", "non_blocking", "copy_stream", "dataset_on_device")
GRAPHS = {"cuda_graphs": True, "compile_mode": "reduce-overhead", "batch_size": 128}


@pytest.mark.parametrize(
    ("kind", "setup", "proposals"),
    [
        ("input-bound", gpu(), {"num_workers": 4, "dataset_on_device": True}),
        (
            "input-bound",
            gpu(FOUR),
            {"persistent_workers": True, "num_workers": 8, "prefetch_factor": 4},
        ),
        ("input-bound", gpu(FOUR | {"prefetch_factor": 8}, cores=4), {"persistent_workers": True}),
        ("input-bound", gpu(in_memory=True), {"dataset_on_device": True}),
        ("input-bound", gpu({"num_workers": 2}, in_memory=True), {"num_workers": 0}),
        ("transfer-bound", BLOCKING, dict.fromkeys(COPIES, True)),
        ("transfer-bound", gpu(dict.fromkeys(COPIES, True)), {}),
        (
            "launch-bound",
            gpu({"optimizer_impl": "for-loop", "batch_size": 64}),
            {"optimizer_impl": "fused"} | GRAPHS,
        ),
        ("launch-bound", gpu({"cuda_graphs": True, "batch_size": 64}), {"batch_size": 128}),
        (
            "compute-bound",
            gpu({"deterministic": True}),
            {"deterministic": False, "precision": "bf16", "compile_mode": "default"},
        ),
        ("compute-bound", gpu({"precision": "bf16", "compile_mode": "default"}), {}),
        (
            "compute-bound",
            gpu(capability=(7, 0)),
            {"precision": "fp16", "compile_mode": "default"},
        ),
        ("compute-bound", gpu(capability=(6, 1)), {"compile_mode": "default"}),
        ("compute-bound", CPU, {"num_threads": 8, "compile_mode": "default"}),
        ("compute-bound", replace(CPU, step_time=0.001), {}),
    ],
)
def test_proposals_come_in_order_until_one_is_allowed(
    kind: str, setup: RunSetup, proposals: dict[str, Any]
) -> None:
    refused: dict[str, Any] = {}
    shown = SHOWN[kind] if setup.on_gpu else on_cpu(0.0, process_cpu=1.0)
    while True:
        found = verdict(shown, setup, lambda name, value: name not in refused)
        assert found.kind == kind
        if found.next is None or found.next.name is None:
            break
        refused[found.next.name] = found.next.value
    assert list(refused.items()) == list(proposals.items())
    replace(RunConfig(), **refused)


def test_settings_in_effect_are_not_recommended_to_a_script() -> None:
    entries = [{"name": "pin_memory", "state": "in effect"}, {"name": "tf32", "state": "refused"}]
    setup = setup_of({"kind": "watch", "settings": entries, "device": "GPU-1"})
    assert setup.applied == {"pin_memory"}
    found = next_to_try("transfer-bound", setup, lambda *_: True)
    assert found is not None
    assert "non_blocking" in found.text
    assert "pin_memory" not in found.text
