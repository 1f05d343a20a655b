"""The cause of a failed allocation, from figures as torch gives them; and the file of records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
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
    ProcessMemory,
    RecentSamples,
    oom_name,
    parse,
)
from tests.support.oom_records import FULL, OTHER, PIECES

MIB = 2**20
GIB = 2**30
TOO_BIG, PIECED, OPTIMIZER = OomCause.TOO_BIG, OomCause.FRAGMENTATION, OomCause.OPTIMIZER
UNKNOWN = OomCause.UNKNOWN


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
    """A record after steps with this peak."""
    flat = readings(steps, lambda i: 200 * MIB, peak)
    return replace(FULL, step=steps, steps_done=steps, readings=flat, **changes)


def codes(verdict: OomVerdict) -> str:
    return " ".join(step.code or "" for step in verdict.next)


FRACTION = replace(
    FULL,
    allowed=GIB,
    free=900 * MIB,
    allocated=1000 * MIB,
    reserved=1010 * MIB,
    requested=100 * MIB,
    others=0,
)
OUTSIDE = replace(PIECES, step=0, steps_done=0, phase=None)
HELD = replace(after(20, 1100 * MIB), allocated=900 * MIB, peak_allocated=1100 * MIB)
USUAL = after(20, 700 * MIB, allocated=900 * MIB)
HIDDEN = replace(OTHER, others=None, processes=(), others_reason="in a container")
STRANGERS = (
    ProcessMemory(pid=8, name="b"),
    ProcessMemory(pid=77, memory=GIB),
    ProcessMemory(pid=9, name="c"),
)
UPDATE = replace(FULL, phase="optimizer")
VALIDATION: dict[str, Any] = {"training": False, "grad": True}
INSIDE = RecentSamples(  # the second sample is inside the step that fails, with its own peak
    ts=(1.0, 2.0),
    steps=(19, 20),
    columns={"memory/peak_allocated": (700.0 * MIB, 1720.0 * MIB)},
)

CASES: dict[str, tuple[OomRecord, OomCause, str]] = {
    "first step": (
        FULL,
        TOO_BIG,
        "In step 1 of this run, 1.68 GiB was in use and 300 MiB more was requested: the GPU has "
        "2.00 GiB",
    ),
    "one tensor": (replace(FULL, requested=3 * GIB, others=GIB), TOO_BIG, "tensor of 3.00 GiB"),
    "a memory fraction": (FRACTION, TOO_BIG, "this process may use 1.00 GiB of the GPU"),
    "a fraction beside others": (replace(FRACTION, free=MIB, others=800 * MIB), TOO_BIG, ""),
    "pieces": (
        PIECES,
        PIECED,
        "300 MiB was requested, and 840 MiB of the reserved memory was free (48%), but not in",
    ),
    "pieces outside of steps": (OUTSIDE, PIECED, ""),
    "pieces beside a smaller process": (replace(PIECES, others=400 * MIB), PIECED, ""),
    "more than before outside of steps": (
        replace(OUTSIDE, peak_allocated=1100 * MIB),
        TOO_BIG,
        "840 MiB",
    ),
    "more than any step": (
        HELD,
        TOO_BIG,
        "Up to 1.07 GiB was in use before, and this step needs at least 1.17 GiB: the GPU has "
        "2.00 GiB. Fragmentation may add to it: 840 MiB of the reserved memory was free",
    ),
    "more than before without samples": (replace(HELD, readings=RecentSamples()), TOO_BIG, ""),
    "pieces, as much was held before": (replace(USUAL, peak_allocated=1500 * MIB), PIECED, ""),
    "few pieces": (replace(FULL, allocated=1640 * MIB, requested=150 * MIB), TOO_BIG, ""),
    "another process": (OTHER, OomCause.OTHER_PROCESS, "Process 77 (python) holds 1.09 GiB"),
    "several processes": (
        replace(OTHER, processes=STRANGERS),
        OomCause.OTHER_PROCESS,
        "Process 77 and 2 more hold",
    ),
    "a desktop": (
        replace(FULL, others=150 * MIB, allocated=1600 * MIB, reserved=1610 * MIB),
        TOO_BIG,
        "",
    ),
    "hidden processes": (HIDDEN, UNKNOWN, "libraries of this one (in a container)"),
    "a long batch": (after(100, 700 * MIB), TOO_BIG, "Up to 700 MiB was in use before"),
    "a sample inside the failing step": (
        replace(after(20, 0), readings=INSIDE),
        TOO_BIG,
        "Up to 700 MiB",
    ),
    "optimizer": (
        UPDATE,
        OPTIMIZER,
        "in its first step, and 300 MiB of that did not fit next to 1.68 GiB allocated.",
    ),
    "a later update": (after(100, 1700 * MIB, phase="optimizer"), TOO_BIG, ""),
    "no more than before": (after(100, 2040 * MIB), UNKNOWN, "no single cause explains it."),
    "enough a moment later": (
        replace(FULL, requested=50 * MIB),
        UNKNOWN,
        "was refused although 100 MiB was free a moment later",
    ),
    "steps without samples": (replace(FULL, step=9, steps_done=9), UNKNOWN, ""),
    "less reserved than allocated": (replace(FULL, reserved=10), UNKNOWN, "not recorded,"),
    "no limit": (replace(FULL, allowed=None, total=None), UNKNOWN, "not recorded,"),
    **{
        f"no {name}": (replace(FULL, **{name: None}), UNKNOWN, "not recorded,")
        for name in ("requested", "free", "allocated", "reserved")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_determined(name: str) -> None:
    record, case, text = CASES[name]
    verdict = judge(record)
    assert verdict.case is case
    assert text in verdict.text
    assert verdict.case is not UNKNOWN or verdict.share is None


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_free_pieces_in_a_step_that_was_never_completed_are_a_remark(done: int, phase: str) -> None:
    """Its peak is still to come, even if as much was allocated before, as by its forward."""
    verdict = judge(replace(PIECES, step=done, steps_done=done, phase=phase))
    first_update = phase == "optimizer" and done == 0
    assert verdict.case is (OPTIMIZER if first_update else TOO_BIG)
    if not first_update:
        assert "840 MiB of the reserved memory was free" in verdict.text
        assert "batch" in verdict.next[0].text
        assert "expandable_segments:True" in (verdict.next[1].code or "")
    assert "ALLOC_CONF" not in codes(judge(FULL))


@pytest.mark.parametrize(
    ("record", "share"),
    [(PIECES, 840 / 1740), (OTHER, 1120 / 2048), (FULL, None)],
)
def test_the_share_is_the_causes_fraction(record: OomRecord, share: float | None) -> None:
    assert judge(record).share == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize("change", [{"grad": False}, {"training": True}])
def test_only_evaluation_with_gradients_gets_no_grad(change: dict[str, Any]) -> None:
    assert "torch.no_grad()" in codes(judge(after(100, 700 * MIB, **VALIDATION)))
    changed = judge(after(100, 700 * MIB, **(VALIDATION | change)))
    assert "torch.no_grad()" not in codes(changed)
    assert "max_length" in codes(changed)
    assert "max_length" not in codes(judge(FULL))


# --- growth ---------------------------------------------------------------------------------------

EVENT = {"bytes_per_step": 2 * MIB, "steps": 700}


def grown(allocated: Any, peak: float = 1700 * MIB, steps: int = 150) -> OomRecord:
    return replace(after(steps, peak), readings=readings(steps, allocated, peak))


def test_growth_has_its_rate_and_its_sum() -> None:
    verdict = judge(grown(lambda i: (200 + 10 * i) * MIB))
    assert verdict.case is OomCause.GROWTH
    assert "grew by 10.0 MiB per step, by 1.44 GiB over 147 steps," in verdict.text
    assert "loss.item()" in codes(verdict)
    assert verdict.evidence["Growth of allocated"] == "10.0 MiB per step over 147 steps"


def test_growth_is_found_in_samples_at_any_phase_of_fast_steps() -> None:
    """Three in ten samples are inside a forward pass and contain its activations."""
    inside = np.random.default_rng(0).random(301) < 0.3
    verdict = judge(grown(lambda i: (200 + 4 * i + 400 * inside[i]) * MIB, steps=300))
    assert verdict.case is OomCause.GROWTH


def test_growth_is_not_extrapolated_beyond_the_samples() -> None:
    """The samples are of the last 30 s of a long run."""
    late = readings(30, lambda i: (900 + i) * MIB, 1700 * MIB)
    late = replace(late, steps=tuple(49_970 + step for step in late.steps))
    verdict = judge(replace(FULL, step=50_000, steps_done=50_000, readings=late))
    assert verdict.case is not OomCause.GROWTH  # 29 MiB of the 200 MiB that are missing
    assert verdict.evidence["Growth of allocated"] == "1.00 MiB per step over 29 steps"


def test_an_event_of_growth_counts_unless_samples_contradict_it() -> None:
    flat = after(300, 1000 * MIB)
    assert judge(flat, growth=EVENT).case is TOO_BIG
    verdict = judge(replace(flat, readings=RecentSamples()), growth=EVENT)
    assert verdict.case is OomCause.GROWTH
    assert "by 1.37 GiB over 700 steps" in verdict.text
    slowly = grown(lambda i: (1500 + 0.4 * i) * MIB)
    assert judge(slowly).case is not OomCause.GROWTH
    event = {"bytes_per_step": 0.4 * MIB, "low": 0.3, "high": 0.5, "steps": 3000}
    assert judge(slowly, growth=event).case is OomCause.GROWTH
    for broken in ({}, {"bytes_per_step": "x", "steps": True}, {"bytes_per_step": 1e400}):
        assert judge(slowly, growth=broken).case is not OomCause.GROWTH


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
def test_other_series_are_no_growth(allocated: Any) -> None:
    assert judge(grown(allocated, 700 * MIB)).case is not OomCause.GROWTH


def test_a_sample_inside_a_long_step_does_not_count_as_growth() -> None:
    steps = tuple(sorted([*range(1, 40)] * 2))
    inside = tuple(float(200 * MIB + (i % 2) * i * 9 * MIB) for i in range(len(steps)))
    peaks = (700.0 * MIB,) * len(steps)
    columns = {"memory/allocated": inside, "memory/peak_allocated": peaks}
    samples = RecentSamples(ts=tuple(map(float, steps)), steps=steps, columns=columns)
    assert judge(replace(after(39, 700 * MIB), readings=samples)).case is TOO_BIG


# --- host memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "text"),
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
def test_host_memory_is_distinguished_from_gpu_memory(host: HostMemory | None, text: str) -> None:
    verdict = judge(OomRecord(ts=0.0, memory=MemoryKind.HOST, requested=300 * MIB, host=host))
    assert verdict.case is OomCause.HOST
    assert text in verdict.text
    assert "num_workers" not in (verdict.next[0].code or "")
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
def test_fewer_workers_are_recommended_only_if_workers_hold_the_memory(
    process: int, children: int, message: str | None, workers: bool
) -> None:
    host = HostMemory(total=8 * GIB, available=MIB, process=process, children=children)
    record = OomRecord(ts=0.0, memory=MemoryKind.HOST, requested=MIB, host=host, message=message)
    verdict = judge(record)
    assert ("num_workers" in codes(verdict)) is workers
    assert ("mmap" in codes(verdict)) is not workers


def test_page_locked_memory_is_host_memory() -> None:
    verdict = judge(OomRecord(ts=0.0, memory=MemoryKind.PINNED))
    assert verdict.case is OomCause.HOST
    assert "could not pin" in verdict.text
    assert "pin_memory" in (verdict.next[0].code or "")


# --- recommendations ------------------------------------------------------------------------------


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
def test_settings_in_force_are_kept_in_the_recommended_line(text: str, line: str) -> None:
    verdict = judge(replace(PIECES, settings=AllocatorSettings(text=text)))
    assert verdict.next[0].code == f"export PYTORCH_ALLOC_CONF={line}"


@pytest.mark.parametrize(
    "allocator",
    [
        AllocatorSettings(text="x", expandable_segments=True),
        AllocatorSettings(backend="cudaMallocAsync"),
    ],
)
def test_settings_in_force_are_not_recommended(allocator: AllocatorSettings) -> None:
    assert "ALLOC_CONF" not in codes(judge(replace(PIECES, settings=allocator)))


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


def test_a_run_of_the_trainer_gets_settings_in_order() -> None:
    wanted = {"batch_size": 32, "activation_checkpointing": True, "precision": "bf16"}
    assert named(judge(FULL, ours())) == list(wanted.items())
    in_force = ours(**wanted | {"batch_size": 1, "dataset_on_device": False})
    assert named(judge(FULL, in_force)) == []
    assert "device with more memory" in judge(FULL, in_force).next[0].text
    old = RunSetup(on_gpu=True, own=True, config=OURS, capability=(7, 0))
    assert ("precision", "fp16") in named(judge(FULL, old))
    unknown = replace(old, capability=None)  # as in the failed construction of a model
    assert ("precision", "bf16") in named(judge(FULL, unknown))
    impossible = judge(FULL, ours(), allowed=lambda name, value: name != "precision")
    assert named(impossible)[2] == ("dataset_on_device", False)


@pytest.mark.parametrize(
    ("requested", "batch"), [(16 * GIB, 32), (81 * GIB, 32), (161 * GIB, 16), (600 * GIB, 8)]
)
def test_a_request_larger_than_the_device_divides_the_batch_until_it_fits(
    requested: int, batch: int
) -> None:
    record = replace(FULL, requested=requested, total=80 * GIB, allowed=None)
    assert named(judge(record, ours()))[0] == ("batch_size", batch)


@pytest.mark.parametrize(
    ("record", "first"),
    [
        (PIECES, ("preallocate_memory", True)),
        (UPDATE, ("optimizer", "sgd")),
        (OomRecord(ts=0.0, memory=MemoryKind.HOST), ("num_workers", 2)),
        (OomRecord(ts=0.0, memory=MemoryKind.PINNED), ("copy_stream", False)),
        (OTHER, ("batch_size", 32)),
    ],
)
def test_each_cause_has_its_first_setting(record: OomRecord, first: tuple[str, Any]) -> None:
    assert named(judge(record, ours()))[0] == first


def test_an_evaluation_gets_no_advice_about_gradients() -> None:
    verdict = judge(replace(FULL, grad=False, training=False, steps_done=0))
    assert "evaluat" in verdict.text
    advice = " ".join(step.text for step in verdict.next)
    assert "Evaluate in smaller batches" in advice
    assert "gradients over two batches" not in advice
    assert "autocast" not in advice


@pytest.mark.parametrize(
    ("change", "has_advice", "is_unsure"),
    [
        ({"autocast": True}, False, False),
        ({"autocast": False}, True, False),
        ({"autocast": False, "phase": "backward"}, True, True),  # off there in any script
        ({}, True, True),
    ],
)
def test_autocast_is_not_recommended_where_it_is_on(
    change: dict[str, Any], has_advice: bool, is_unsure: bool
) -> None:
    steps = [step for step in judge(replace(FULL, **change)).next if "autocast" in step.text]
    assert len(steps) == has_advice
    assert ["if it is not yet" in step.text for step in steps] == [is_unsure] * has_advice


def test_a_smaller_batch_is_not_recommended_for_the_optimizers_state() -> None:
    verdict = judge(UPDATE)
    assert any("hardly helps" in step.text for step in verdict.next)
    assert "backward" not in codes(verdict)


# --- the file -------------------------------------------------------------------------------------

RICH = replace(
    FULL,
    message="CUDA out of memory",
    processes=OTHER.processes,
    host=HostMemory(total=1, kills=0),
    settings=AllocatorSettings(text="a:b", expandable_segments=True),
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
        ({"first": {"ts": 1.0, "processes": [{"name": "a"}]}}, "missing.*report.first.processes"),
        ({"first": {"ts": 1.0, "readings": {"columns": []}}}, "report.first.readings.columns"),
    ],
)
def test_a_malformed_file_is_rejected_with_its_field(changes: dict[str, Any], words: str) -> None:
    raw = OomReport(first=FULL, last=FULL).to_json() | changes
    with pytest.raises(ValueError, match=words):
        parse(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"schema": 1, "first": NaN}'])
def test_other_content_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be|not a finite number"):
        parse(text)


json_values = st.sampled_from(
    [None, True, -1, 2**63, 0.5, float("nan"), "", "x", [], ["x"], [None], {}, {"x": []}]
)
COMPLETE = OomReport(first=FULL, last=FULL).to_json()["first"]
sizes = st.none() | st.integers(-5, 2**63 - 1)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(COMPLETE)), json_values, min_size=1, max_size=3))
def test_any_json_is_a_record_or_an_error(changes: dict[str, Any]) -> None:
    raw = COMPLETE | changes
    try:
        report = parse(json.dumps({"schema": 1, "first": raw, "last": raw}))
    except ValueError:
        return
    assert judge(report.last).text


FIGURES = ("requested", "total", "allowed", "free", "allocated", "reserved", "others")


@settings(max_examples=300, deadline=None)
@given(
    figures=st.fixed_dictionaries(dict.fromkeys(FIGURES, sizes)),
    steps=st.none() | st.integers(0, 200),
    phase=st.sampled_from([None, "forward", "optimizer"]),
    peak=st.integers(0, 2**40),
)
def test_a_verdict_is_complete_for_any_figures(
    figures: dict[str, Any], steps: int | None, phase: str | None, peak: int
) -> None:
    samples = readings(steps or 0, lambda i: peak * i, peak)
    record = replace(FULL, step=steps or 0, steps_done=steps, phase=phase, readings=samples)
    verdict = judge(replace(record, **figures), ours())
    assert verdict.text.endswith(".")
    assert verdict.next
    assert verdict.share is None or 0 <= verdict.share <= 1
    if verdict.case is UNKNOWN:
        assert verdict.share is None
