"""Each case of a failed allocation, from figures as torch gives them; what is missing is said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.bottleneck.recommendations import RunSetup
from stepscope.memory.oom.classify import OomCause, OomVerdict, judge
from stepscope.memory.oom.record import (
    AllocatorSettings,
    HostMemory,
    MemoryKind,
    OomRecord,
    OomReport,
    OptimizerMemory,
    ProcessMemory,
    RecentSamples,
    SegmentStats,
    oom_name,
    parse,
)
from tests.support.oom_records import FULL, OTHER, PIECES

MIB = 2**20
GIB = 2**30


def readings(steps: int, allocated: Any, peak: float) -> RecentSamples:
    """A sample after each step; `allocated` is a function of the step."""
    every = range(1, steps + 1)
    return RecentSamples(
        ts=tuple(1_800_000_000.0 - 0.1 * (steps - i) for i in every),
        steps=tuple(every),
        columns={
            "memory/allocated": tuple(float(allocated(i)) for i in every),
            "memory/peak_allocated": (float(peak),) * steps,
        },
    )


def after(steps: int, peak: float, **changes: Any) -> OomRecord:
    """A record after steps whose peak was this."""
    flat = readings(steps, lambda i: 200 * MIB, peak)
    return replace(FULL, step=steps, steps_done=steps, readings=flat, **changes)


def test_a_training_that_never_had_room_is_too_big() -> None:
    verdict = judge(FULL)
    assert verdict.case is OomCause.TOO_BIG
    assert (
        "1.68 GiB was in use and 300 MiB more was requested: the GPU has 2.00 GiB" in verdict.text
    )
    assert verdict.text.startswith("Before the first step")
    assert verdict.evidence["Requested"] == "300 MiB"
    assert verdict.evidence["Other processes"] == "0 B"
    assert "batch" in verdict.next[0].text
    assert str(verdict.next[0].code).endswith(
        "if i % 2:\n    optimizer.step()\n    optimizer.zero_grad()"
    )


def test_one_tensor_larger_than_the_gpu_is_too_big_whatever_else_is_known() -> None:
    verdict = judge(replace(FULL, requested=3 * GIB, others=GIB))
    assert verdict.case is OomCause.TOO_BIG
    assert "tensor of 3.00 GiB" in verdict.text
    # After steps that fitted it is this one that is different.
    assert judge(replace(after(50, 500 * MIB), requested=3 * GIB)).case is OomCause.SPIKE


def test_a_memory_fraction_is_the_limit_and_said() -> None:
    record = replace(FULL, allowed=GIB, free=900 * MIB, allocated=1000 * MIB, reserved=1010 * MIB)
    verdict = judge(replace(record, requested=100 * MIB, others=0))
    assert verdict.case is OomCause.TOO_BIG
    assert "this process may use 1.00 GiB of the GPU" in verdict.text
    # The memory of others is not what is missing then.
    crowded = judge(replace(record, requested=100 * MIB, free=20 * MIB, others=800 * MIB))
    assert crowded.case is OomCause.TOO_BIG


def test_steps_that_fill_the_gpu_leave_no_room_for_a_little_more() -> None:
    verdict = judge(after(100, 1700 * MIB, others=0))
    assert verdict.case is OomCause.TOO_BIG
    assert "too close to the limit for the differences between steps" in verdict.text


def test_memory_in_pieces_is_named_with_the_share_that_proves_it() -> None:
    verdict = judge(PIECES)
    assert verdict.case is OomCause.FRAGMENTATION
    assert verdict.share == pytest.approx(840 / 1740, abs=1e-4)
    assert "840 MiB of the reserved memory was free in pieces of at most 60.0 MiB (48%" in (
        verdict.text
    )
    assert "expandable_segments:True" in (verdict.next[0].code or "")


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_free_pieces_in_a_step_that_was_never_completed_are_a_remark(done: int, phase: str) -> None:
    """Its peak is still to come, even where as much was allocated before, as by its forward."""
    record = replace(PIECES, step=done, steps_done=done, phase=phase)
    verdict = judge(record)
    first_update = phase == "optimizer" and done == 0
    assert verdict.case is (OomCause.OPTIMIZER if first_update else OomCause.TOO_BIG)
    if not first_update:
        assert "840 MiB of the reserved memory was free in pieces" in verdict.text
        assert "batch" in verdict.next[0].text
        assert "expandable_segments:True" in (verdict.next[1].code or "")
    assert not any("ALLOC_CONF" in (step.code or "") for step in judge(FULL).next)


def test_a_block_of_another_stream_is_proof_in_the_first_step() -> None:
    segments = SegmentStats(count=9, largest_free=MIB, elsewhere=320 * MIB)
    record = replace(PIECES, step=0, steps_done=0, peak_allocated=None, segments=segments)
    assert judge(record).case is OomCause.FRAGMENTATION


def test_pieces_outside_of_any_step_count_where_the_demand_was_held_before() -> None:
    outside = replace(PIECES, step=0, steps_done=0, phase=None)
    assert judge(outside).case is OomCause.FRAGMENTATION
    assert judge(replace(outside, peak_allocated=1100 * MIB)).case is OomCause.TOO_BIG


def test_more_than_any_step_has_held_is_not_blamed_on_pieces() -> None:
    held = replace(after(20, 1100 * MIB), allocated=900 * MIB, peak_allocated=1100 * MIB)
    verdict = judge(held)
    assert verdict.case is OomCause.TOO_BIG
    assert "Up to 1.07 GiB was in use before, and this step needs at least 1.17 GiB" in verdict.text
    assert "840 MiB of the reserved memory was free" in verdict.text
    unread = replace(held, readings=RecentSamples())  # the sampler has seen none of its steps
    assert judge(unread).case is OomCause.TOO_BIG


def test_an_unusual_step_that_was_held_before_fails_for_its_pieces() -> None:
    """As where a script fills memory between its steps and frees every other block."""
    usual = after(20, 700 * MIB, allocated=900 * MIB)
    assert judge(replace(usual, peak_allocated=1500 * MIB)).case is OomCause.FRAGMENTATION
    assert judge(replace(usual, peak_allocated=1100 * MIB)).case is OomCause.SPIKE


def test_what_is_set_is_never_proposed() -> None:
    on = replace(PIECES, settings=AllocatorSettings(text="x", expandable_segments=True))
    # What is left, max_split_size_mb, does not act on expandable segments.
    assert not any("ALLOC_CONF" in (step.code or "") for step in judge(on).next)
    other = replace(on, settings=AllocatorSettings(backend="cudaMallocAsync"))
    assert not any("ALLOC_CONF" in (step.code or "") for step in judge(other).next)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "expandable_segments:True"),
        (
            "max_split_size_mb:64, expandable_segments:False",
            "max_split_size_mb:64,expandable_segments:True",
        ),
        (
            "roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.8",
            "'roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.8,"
            "expandable_segments:True'",
        ),
        ("backend:native;touch /tmp/x,$(id)", "backend:native,expandable_segments:True"),
    ],
)
def test_settings_in_force_stay_beside_the_one_that_is_proposed(text: str, line: str) -> None:
    verdict = judge(replace(PIECES, settings=AllocatorSettings(text=text)))
    assert verdict.next[0].code == f"export PYTORCH_ALLOC_CONF={line}"


@pytest.mark.parametrize(
    ("segments", "whose"),
    [
        (SegmentStats(count=9, largest_free=MIB, elsewhere=320 * MIB), "another stream"),
        (
            SegmentStats(count=9, largest_free=MIB, elsewhere=320 * MIB, private=400 * MIB),
            "private",
        ),
    ],
)
def test_a_block_that_would_fit_and_belongs_to_another_is_told(
    segments: SegmentStats, whose: str
) -> None:
    verdict = judge(replace(PIECES, segments=segments))
    assert verdict.case is OomCause.FRAGMENTATION
    assert f"could take the requested 300 MiB, but it belongs to {whose}" in (
        verdict.text.replace("a private pool", "private")
    )


def test_a_little_in_pieces_is_not_the_cause() -> None:
    little = replace(FULL, allocated=1640 * MIB, requested=150 * MIB)
    assert judge(little).case is OomCause.TOO_BIG


def test_another_process_is_named_with_what_it_holds() -> None:
    verdict = judge(OTHER)
    assert verdict.case is OomCause.OTHER_PROCESS
    assert verdict.text.startswith("python (process 77) holds 1.09 GiB")
    assert verdict.share == pytest.approx(1120 / 2048, abs=1e-4)
    assert verdict.next[0].text == (
        "End process 77 (python), which held 1.09 GiB, if it still runs: it was yours."
    )
    assert not any("kill" in (step.code or "") for step in verdict.next)


def test_a_process_of_somebody_else_is_waited_for() -> None:
    strangers = (
        ProcessMemory(pid=77, memory=GIB),
        ProcessMemory(pid=8, name="b"),
        ProcessMemory(pid=9, name="c"),
    )
    verdict = judge(replace(OTHER, processes=strangers))
    assert verdict.text.startswith("A process (process 77), b (process 8) and 1 more hold")
    assert not any("kill" in (step.code or "") for step in verdict.next)
    assert verdict.next[0].text.startswith("Wait until the other process has ended")


def test_others_are_told_from_our_own_where_only_our_memory_is_known() -> None:
    verdict = judge(replace(OTHER, others=None, processes=()))
    assert verdict.case is OomCause.OTHER_PROCESS
    assert verdict.text.startswith("Another process holds 1.09 GiB")


def test_a_desktop_is_no_cause() -> None:
    desktop = replace(FULL, others=150 * MIB, allocated=1600 * MIB, reserved=1610 * MIB)
    assert judge(desktop).case is OomCause.TOO_BIG


def test_where_the_driver_hides_processes_no_case_is_named() -> None:
    hidden = replace(OTHER, others=None, own=None, processes=(), others_reason="in a container")
    verdict = judge(hidden)
    assert verdict.case is OomCause.UNKNOWN
    assert "held outside of PyTorch's memory" in verdict.text
    assert "in a container" in verdict.text
    assert verdict.share is None


def test_growth_is_told_a_step_and_in_all() -> None:
    grown = replace(
        FULL,
        step=150,
        steps_done=150,
        readings=readings(150, lambda i: (200 + 10 * i) * MIB, 1700 * MIB),
    )
    verdict = judge(grown)
    assert verdict.case is OomCause.GROWTH
    assert "grew by 10.0 MiB per step, by 1.44 GiB over 147 steps," in verdict.text
    assert "loss.item()" in (verdict.next[0].code or "")
    assert verdict.evidence["Growth of allocated"] == "10.0 MiB per step over 147 steps"


def test_growth_is_not_carried_to_steps_that_nobody_saw() -> None:
    """The samples are of the last 30 s of a long run."""
    late = readings(30, lambda i: (900 + i) * MIB, 1700 * MIB)
    late = replace(late, steps=tuple(49_970 + step for step in late.steps))
    record = replace(FULL, step=50_000, steps_done=50_000, readings=late)
    assert judge(record).case is not OomCause.GROWTH  # 29 MiB of the 200 MiB that are missing
    assert judge(record).evidence["Growth of allocated"] == "1.00 MiB per step over 29 steps"


def test_an_event_of_growth_that_is_over_is_no_cause() -> None:
    event = {"bytes_per_step": 2 * MIB, "steps": 700}
    flat = after(50_000, 1000 * MIB)
    assert judge(flat, growth=event).case is OomCause.SPIKE
    few = replace(flat, readings=replace(flat.readings, ts=(), steps=(), columns={}))
    verdict = judge(few, growth=event)
    assert verdict.case is OomCause.GROWTH
    assert "by 1.37 GiB over 700 steps" in verdict.text


def test_growth_is_taken_from_the_runs_own_event() -> None:
    slowly = readings(100, lambda i: (1500 + 0.4 * i) * MIB, 1700 * MIB)
    record = replace(FULL, step=4000, steps_done=4000, readings=slowly)
    assert judge(record).case is not OomCause.GROWTH
    event = {"bytes_per_step": 0.4 * MIB, "low": 0.3, "high": 0.5, "steps": 3000}
    assert judge(record, growth=event).case is OomCause.GROWTH
    for broken in ({}, {"bytes_per_step": "x", "steps": True}, {"bytes_per_step": 1e400}):
        assert judge(record, growth=broken).case is not OomCause.GROWTH


@pytest.mark.parametrize(
    "allocated",
    [
        lambda i: (200 + 300 * (i % 2)) * MIB,  # up and down
        lambda i: (200 + i % 17) * MIB,
        lambda i: (200 + 9 * i * (i % 3 != 1)) * MIB,  # up in most steps, and down again
        lambda i: (200 + 3 * i + 20 * (i * 7919 % 101)) * MIB,  # more noise than trend
        lambda i: 900 * MIB - i,
        lambda i: 200 * MIB + i,  # a byte a step explains nothing
    ],
)
def test_what_is_no_trend_is_not_called_growth(allocated: Any) -> None:
    record = replace(after(150, 700 * MIB), readings=readings(150, allocated, 700 * MIB))
    assert judge(record).case is not OomCause.GROWTH


def test_a_reading_inside_a_long_step_does_not_count_as_growth() -> None:
    steps = tuple(sorted([*range(1, 40)] * 2))
    inside = tuple(float(200 * MIB + (i % 2) * i * 9 * MIB) for i in range(len(steps)))
    record = replace(
        after(39, 700 * MIB),
        readings=RecentSamples(
            ts=tuple(float(i) for i in range(len(steps))),
            steps=steps,
            columns={
                "memory/allocated": inside,
                "memory/peak_allocated": (700.0 * MIB,) * len(steps),
            },
        ),
    )
    assert judge(record).case is OomCause.SPIKE


def test_one_long_batch_is_a_spike() -> None:
    verdict = judge(after(100, 700 * MIB, inputs=("8 × 4096",)))
    assert verdict.case is OomCause.SPIKE
    assert "In the forward of one step 1.97 GiB was needed, versus at most" in verdict.text
    assert verdict.evidence["Model inputs"] == "8 × 4096"
    assert "length" in verdict.next[0].text


def test_the_step_under_way_is_not_among_the_usual_ones() -> None:
    """A reading inside it has its own peak."""
    record = after(20, 700 * MIB)
    inside = replace(
        record,
        readings=RecentSamples(
            ts=(1.0, 2.0),
            steps=(19, 20),
            columns={"memory/peak_allocated": (700.0 * MIB, 1720.0 * MIB)},
        ),
    )
    assert judge(inside).case is OomCause.SPIKE


def test_validation_with_gradients_is_named_by_mode_and_phase() -> None:
    validation: dict[str, Any] = {
        "phase": "validation",
        "training": False,
        "training_at_steps": True,
    }
    verdict = judge(after(100, 1700 * MIB, **validation, function="evaluate"))
    assert verdict.case is not OomCause.SPIKE  # 2,020 MiB is no more than 1.25 times that
    verdict = judge(after(100, 1000 * MIB, **validation, function="evaluate"))
    assert verdict.case is OomCause.SPIKE
    assert "Validation (in evaluate) ran with gradients on," in verdict.text
    assert "torch.no_grad()" in (verdict.next[0].code or "")
    unread = judge(replace(FULL, steps_done=12, step=12, **validation))
    assert unread.case is OomCause.UNKNOWN  # nothing tells what the steps before needed
    less = after(100, 2040 * MIB, **validation)
    assert judge(less).case is not OomCause.SPIKE
    for change in ({"grad": False}, {"training": True}, {"training_at_steps": False}):
        other = judge(after(100, 700 * MIB, **(validation | change)))
        assert not any("torch.no_grad()" in (step.code or "") for step in other.next)


ADAM = replace(
    FULL,
    phase="optimizer",
    optimizer=OptimizerMemory(
        name="AdamW", parameters=600 * MIB, state=500 * MIB, expected=1200 * MIB
    ),
)


def test_the_first_step_of_an_optimizer_is_named_with_its_state() -> None:
    verdict = judge(ADAM)
    assert verdict.case is OomCause.OPTIMIZER
    assert "AdamW keeps 1.17 GiB of state for 600 MiB" in verdict.text
    assert "500 MiB existed when another 300 MiB did not fit." in verdict.text
    assert verdict.share == pytest.approx(1200 / 2048, abs=1e-4)
    assert any("hardly helps" in step.text for step in verdict.next)


def test_the_state_still_to_come_counts_against_pieces_that_fit_one_tensor() -> None:
    small = replace(ADAM, allocated=1400 * MIB, requested=150 * MIB)
    assert judge(small).case is OomCause.OPTIMIZER
    complete = replace(
        small, optimizer=OptimizerMemory(name="SGD", parameters=MIB, state=MIB, expected=MIB)
    )
    assert judge(complete).case is OomCause.OPTIMIZER  # pieces prove nothing in a first step


def test_an_optimizer_nobody_knows_is_named_without_figures_of_it() -> None:
    unknown = OptimizerMemory(name="Mine", parameters=MIB, state=0)
    assert "Mine keeps state for 1.00 MiB" in judge(replace(ADAM, optimizer=unknown)).text
    assert judge(replace(ADAM, optimizer=None)).case is OomCause.OPTIMIZER
    later = after(100, 1700 * MIB, phase="optimizer")
    assert judge(later).case is OomCause.TOO_BIG


def test_a_state_that_is_complete_is_not_called_missing() -> None:
    whole = OptimizerMemory(name="Adam", parameters=600 * MIB, state=GIB, expected=GIB)
    verdict = judge(replace(ADAM, optimizer=whole))
    assert verdict.case is OomCause.OPTIMIZER
    assert any("fused" in (step.code or "") for step in verdict.next)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (None, "The host ran out of memory for 300 MiB."),
        (HostMemory(total=8 * GIB, available=GIB), ": 1.00 GiB of 8.00 GiB was available."),
        (
            HostMemory(total=8 * GIB, available=GIB, limit=2 * GIB, limit_used=2 * GIB - MIB),
            "2.00 GiB of the container's 2.00 GiB used.",
        ),
        (HostMemory(kills=1), "The kernel killed a process because this"),
        (HostMemory(kills=3), "The kernel killed 3 processes because this"),
    ],
)
def test_host_memory_is_told_from_gpu_memory(host: HostMemory | None, words: str) -> None:
    record = OomRecord(ts=0.0, memory=MemoryKind.HOST, requested=300 * MIB, host=host)
    verdict = judge(record)
    assert verdict.case is OomCause.HOST
    assert words in verdict.text
    assert "num_workers" not in (verdict.next[0].code or "")
    assert any("has workers" in step.text for step in verdict.next)  # nobody knows whether it has
    limited = host is not None and host.limit is not None
    assert any("container more memory" in step.text for step in verdict.next) is limited


@pytest.mark.parametrize(
    ("process", "children", "message", "workers"),
    [
        (GIB, 6 * GIB, None, True),
        (6 * GIB, GIB, None, False),
        (6 * GIB, 0, None, False),
        (GIB, 0, "DataLoader worker (pid 12) is killed by signal: Killed.", True),
    ],
)
def test_fewer_workers_are_advised_only_where_workers_hold_the_memory(
    process: int, children: int, message: str | None, workers: bool
) -> None:
    host = HostMemory(total=8 * GIB, available=MIB, process=process, children=children)
    record = OomRecord(
        ts=0.0, memory=MemoryKind.HOST, requested=300 * MIB, host=host, message=message
    )
    codes = " ".join(step.code or "" for step in judge(record).next)
    assert ("num_workers" in codes) is workers
    assert ("mmap" in codes) is not workers
    assert not any("has workers" in step.text for step in judge(record).next)


@pytest.mark.parametrize("limit", [None, GIB])
def test_one_request_beyond_the_host_is_called_a_wrong_shape(limit: int | None) -> None:
    host = HostMemory(total=8 * GIB, available=7 * GIB, process=GIB, children=3 * GIB, limit=limit)
    asked = 40 * 2**40 if limit is None else 2 * GIB
    verdict = judge(OomRecord(ts=0.0, memory=MemoryKind.HOST, requested=asked, host=host))
    assert verdict.case is OomCause.HOST
    assert "more than the host has in all" in verdict.text
    (step,) = verdict.next
    assert "shape" in step.text


def test_page_locked_memory_is_host_memory() -> None:
    verdict = judge(OomRecord(ts=0.0, memory=MemoryKind.PINNED))
    assert verdict.case is OomCause.HOST
    assert "could not pin" in verdict.text
    assert "pin_memory" in (verdict.next[0].code or "")


@pytest.mark.parametrize(
    "missing", ["requested", "free", "allocated", "reserved"], ids=lambda name: f"no {name}"
)
def test_without_a_figure_no_case_is_named(missing: str) -> None:
    verdict = judge(replace(FULL, **{missing: None}))
    assert verdict.case is OomCause.UNKNOWN
    assert "not recorded," in verdict.text
    assert judge(replace(FULL, allowed=None, total=None)).case is OomCause.UNKNOWN
    assert judge(replace(FULL, reserved=10)).case is OomCause.UNKNOWN  # less than is allocated


def test_where_nothing_explains_it_the_verdict_says_so() -> None:
    verdict = judge(replace(FULL, requested=50 * MIB))
    assert verdict.case is OomCause.UNKNOWN
    assert "was refused although 100 MiB was free a moment later" in verdict.text
    unrecorded = replace(FULL, step=9, steps_done=9)
    assert "; the need of earlier steps was not recorded." in judge(unrecorded).text


OURS = {
    "batch_size": 64,
    "gradient_accumulation_steps": 1,
    "precision": "fp32",
    "activation_checkpointing": False,
    "preallocate_memory": False,
    "optimizer": "adam",
    "num_workers": 4,
    "pin_memory": True,
    "non_blocking": True,
    "copy_stream": True,
    "cuda_graphs": True,
    "dataset_on_device": True,
    "prefetch_factor": 2,
}


def ours(**changes: Any) -> RunSetup:
    return RunSetup(on_gpu=True, own=True, config=OURS | changes, capability=(9, 0))


def named(verdict: OomVerdict) -> list[tuple[str | None, Any]]:
    return [(step.name, step.value) for step in verdict.next if step.name]


def test_a_run_of_ours_gets_its_own_settings_in_order() -> None:
    assert named(judge(FULL, ours())) == [
        ("batch_size", 32),
        ("activation_checkpointing", True),
        ("precision", "bf16"),
        ("dataset_on_device", False),
    ]
    set_already = ours(
        batch_size=1, activation_checkpointing=True, precision="bf16", dataset_on_device=False
    )
    assert named(judge(FULL, set_already)) == []
    assert "device with more memory" in judge(FULL, set_already).next[0].text
    old = RunSetup(on_gpu=True, own=True, config=OURS, capability=(7, 0))
    assert ("precision", "fp16") in named(judge(FULL, old))


def test_only_what_the_machine_can_do_is_proposed() -> None:
    found = judge(FULL, ours(), allowed=lambda name, value: name != "precision")
    assert "precision" not in dict(named(found))


@pytest.mark.parametrize(
    ("record", "first"),
    [
        (PIECES, ("preallocate_memory", True)),
        (
            replace(PIECES, segments=SegmentStats(count=1, largest_free=0, elsewhere=GIB)),
            ("copy_stream", False),
        ),
        (ADAM, ("optimizer", "sgd")),
        (OomRecord(ts=0.0, memory=MemoryKind.HOST), ("num_workers", 2)),
        (OomRecord(ts=0.0, memory=MemoryKind.PINNED), ("copy_stream", False)),
        (OTHER, ("batch_size", 32)),
    ],
)
def test_each_case_has_settings_of_its_own(record: OomRecord, first: tuple[str, Any]) -> None:
    assert named(judge(record, ours()))[0] == first


# --- the file -------------------------------------------------------------------------------------

RICH = replace(
    ADAM,
    message="CUDA out of memory",
    processes=OTHER.processes,
    segments=PIECES.segments,
    host=HostMemory(total=1, kills=0),
    settings=AllocatorSettings(text="a:b", expandable_segments=True, fraction=0.5),
    readings=readings(3, lambda i: i, 4),
    inputs=("1 × 2",),
    stack=("train.py:3 step",),
)


def test_a_report_is_the_same_after_it_was_a_file() -> None:
    report = OomReport(first=FULL, last=RICH, seen=3, ended=True)
    assert parse(json.dumps(report.to_json())) == report
    assert (oom_name(), oom_name(3)) == ("oom.json", "oom-rank3.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 9}, "schema 1"),
        ({"last": None}, "report.last"),
        ({"last": {}}, "missing"),
        ({"seen": "many"}, "report.seen"),
        ({"seen": 10**80}, "64 bits"),
        ({"first": {"ts": 1.0, "free": "x"}}, "report.first.free"),
        ({"first": {"ts": 1.0, "free": True}}, "report.first.free"),
        ({"first": {"ts": 1.0, "memory": "tape"}}, "report.first.memory"),
        ({"first": {"ts": 1.0, "stack": "abc"}}, "report.first.stack"),
        ({"first": {"ts": 1.0, "stack": ["a"] * 3000}}, "list of at most"),
        ({"first": {"ts": 1.0, "blocks": [{"count": 1}]}}, "missing"),
        ({"first": {"ts": 1.0, "processes": [{"pid": -1}]}}, "processes.*pid"),
        ({"first": {"ts": 1.0, "processes": [{"pid": 1}]}}, "processes.*pid"),
        ({"first": {"ts": 1.0, "readings": {"columns": []}}}, "report.first.readings.columns"),
    ],
)
def test_a_file_of_another_form_is_refused_by_its_field(
    changes: dict[str, Any], words: str
) -> None:
    told = OomReport(first=FULL, last=FULL).to_json() | changes
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        parse(json.dumps(told))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"schema": 1, "first": NaN}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be|not a finite number"):
        parse(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
sizes = st.none() | st.integers(-5, 2**63 - 1)


@settings(max_examples=200, deadline=None)
@given(
    told=st.fixed_dictionaries(
        {"ts": st.floats(allow_nan=False, allow_infinity=False)},
        optional=dict.fromkeys(OomRecord.__dataclass_fields__.keys() - {"ts"}, json_values),
    )
)
def test_any_json_is_a_record_or_a_sentence(told: dict[str, Any]) -> None:
    try:
        report = parse(json.dumps({"schema": 1, "first": told, "last": told}))
    except ValueError:
        return
    assert judge(report.last).text


@settings(max_examples=300, deadline=None)
@given(
    figures=st.fixed_dictionaries(
        dict.fromkeys(
            ("requested", "total", "allowed", "free", "allocated", "reserved", "own", "others"),
            sizes,
        )
    ),
    steps=st.none() | st.integers(0, 200),
    phase=st.sampled_from([None, "forward", "optimizer", "validation"]),
    peak=st.integers(0, 2**40),
)
def test_whatever_the_figures_a_verdict_is_whole(
    figures: dict[str, int | None], steps: int | None, phase: str | None, peak: int
) -> None:
    record = replace(
        FULL,
        step=steps or 0,
        steps_done=steps,
        phase=phase,
        readings=readings(steps or 0, lambda i: peak * i, peak),
        **figures,
    )
    verdict = judge(record, ours())
    assert verdict.text.endswith(".")
    assert verdict.next
    assert verdict.share is None or 0 <= verdict.share <= 1
    if verdict.case is OomCause.UNKNOWN:
        assert verdict.share is None
