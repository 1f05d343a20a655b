"""The cause of a failed allocation, from figures as torch gives them; and the file of records."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.memory.growth import GrowthTrend
from stepscope.memory.oom.classify import OomCause, OomFinding, diagnose
from stepscope.memory.oom.record import (
    HostMemory,
    MemoryKind,
    OomRecord,
    OomReport,
    read_report,
)
from stepscope.run_setup import RunSetup
from tests.support.oom_records import FULL, OTHER, PIECES

MIB = 2**20
GIB = 2**30
TOO_LARGE, PIECED, UNKNOWN = OomCause.TOO_LARGE, OomCause.FRAGMENTATION, OomCause.UNKNOWN
OTHERS, GROWTH, HOST = OomCause.OTHER_PROCESS, OomCause.GROWTH, OomCause.HOST


def after(steps: int, peak: int, **changes: Any) -> OomRecord:
    """A record after steps with this peak."""
    return replace(FULL, step=steps, steps_done=steps, peak_allocated=peak, **changes)


FRACTION = replace(FULL, allowed=GIB, free=900 * MIB, allocated=1000 * MIB, reserved=1010 * MIB)
OUTSIDE = replace(PIECES, step=0, steps_done=0, phase=None)
UPDATE = replace(FULL, phase="optimizer")
LEAK = after(150, 1720 * MIB, growth=GrowthTrend(3, 150, 0.0, 1470.0 * MIB))
BIG_EVALUATION = after(16, 1720 * MIB)
HOST_MEMORY = OomRecord(ts=0.0, memory=MemoryKind.HOST, requested=300 * MIB)
LIMITED = HostMemory(total=8 * GIB, available=GIB)

CASES: dict[str, tuple[OomRecord, OomCause, str]] = {
    "first step": (FULL, TOO_LARGE, "1.68 GiB was in use before step 1 was complete, and 300 MiB"),
    "one tensor": (replace(FULL, requested=3 * GIB, others=GIB), TOO_LARGE, "tensor of 3.00 GiB"),
    "a memory fraction": (FRACTION, TOO_LARGE, "this process may use 1.00 GiB of the GPU"),
    "pieces": (PIECES, PIECED, "300 MiB was requested, and 840 MiB of the reserved memory was"),
    "pieces outside of steps": (OUTSIDE, PIECED, ""),
    "pieces beside a smaller process": (replace(PIECES, others=400 * MIB), PIECED, ""),
    "pieces, more than was held": (replace(PIECES, peak_allocated=1100 * MIB), TOO_LARGE, ""),
    "pieces in the first step": (replace(PIECES, steps_done=0), TOO_LARGE, ""),
    "pieces in the second step": (replace(PIECES, steps_done=1, phase=None), TOO_LARGE, ""),
    "few pieces": (replace(FULL, allocated=1640 * MIB, requested=150 * MIB), TOO_LARGE, ""),
    "another process": (OTHER, OTHERS, "Process 77 (python) held 1.09 GiB of the GPU's"),
    "hidden processes": (
        replace(OTHER, others=None, others_reason="in a container"),
        UNKNOWN,
        "libraries of this one (in a container)",
    ),
    "a long batch": (after(100, 1720 * MIB), TOO_LARGE, "Up to 1.68 GiB was in use before"),
    "optimizer": (UPDATE, TOO_LARGE, "The optimizer creates its state in its first step"),
    "no more than before": (after(100, 2040 * MIB), UNKNOWN, "no single cause explains it."),
    "enough a moment later": (replace(FULL, requested=50 * MIB), UNKNOWN, "was refused although"),
    "no peak": (replace(FULL, step=9, steps_done=9), UNKNOWN, ""),
    "less reserved than allocated": (replace(FULL, reserved=10), UNKNOWN, "not recorded,"),
    "no counter": (replace(FULL, allocated=None), UNKNOWN, "not recorded,"),
    "growth": (LEAK, GROWTH, "grew by 10.0 MiB per step, by 1.44 GiB over 147 steps,"),
    "growth that does not explain it": (
        replace(LEAK, growth=GrowthTrend(121, 150, 0.0, 29.0 * MIB)),
        TOO_LARGE,
        "",
    ),
    "growth over batches": (
        replace(BIG_EVALUATION, batches=GrowthTrend(2, 51, 0.0, 780.0 * MIB)),
        GROWTH,
        "added 15.9 MiB: 780 MiB over 51 batches",
    ),
    "a large evaluation": (BIG_EVALUATION, TOO_LARGE, ""),
    "batches that add little": (
        replace(BIG_EVALUATION, batches=GrowthTrend(2, 51, 0.0, 40.0 * MIB)),
        TOO_LARGE,
        "",
    ),
    "new state": (
        after(30, 1900 * MIB, phase="optimizer", stack=("x/torch/optim/adam.py:5 _init_group",)),
        OomCause.OPTIMIZER_STATE,
        "The optimizer creates new state in step 31, and 300 MiB of that did not fit",
    ),
    "an earlier model": (
        after(30, 1720 * MIB, phase="optimizer", earlier=400 * MIB),
        OomCause.EARLIER,
        "still holds 400 MiB; 300 MiB more",
    ),
    "a small earlier model": (after(30, 1720 * MIB, earlier=150 * MIB), TOO_LARGE, ""),
    "a retry within except": (
        after(10, 900 * MIB, retries=3),
        OomCause.RETRY,
        "handled 3 earlier failures",
    ),
    "another GPU": (
        after(10, 1500 * MIB, trains_on=1, growth=LEAK.growth),
        OomCause.OTHER_DEVICE,
        "300 MiB was requested on GPU 0, but this process trains on GPU 1. It held 1.68 GiB",
    ),
    "the own GPU": (after(10, 1720 * MIB, trains_on=0), TOO_LARGE, ""),
    "host": (HOST_MEMORY, HOST, "The host ran out of memory for 300 MiB."),
    "figures of the host": (replace(HOST_MEMORY, host=LIMITED), HOST, "1.00 GiB of 8.00 GiB was"),
    "pinned": (OomRecord(ts=0.0, memory=MemoryKind.PINNED), HOST, "could not pin"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_determined(name: str) -> None:
    record, cause, text = CASES[name]
    finding = diagnose(record)
    assert finding.cause is cause
    assert text in finding.text
    assert finding.recommendations


# --- recommendations ------------------------------------------------------------------------------


def codes(finding: OomFinding) -> str:
    return " ".join(step.code or "" for step in finding.recommendations)


@pytest.mark.parametrize(
    ("record", "first"),
    [
        (FULL, "backward()"),
        (PIECES, "expandable_segments:True"),
        (OTHER, "CUDA_VISIBLE_DEVICES"),
        (LEAK, "loss.item()"),
        (HOST_MEMORY, "num_workers"),
    ],
)
def test_a_script_gets_code(record: OomRecord, first: str) -> None:
    assert first in (diagnose(record).recommendations[0].code or "")


@pytest.mark.parametrize("record", [UPDATE, after(100, 1720 * MIB, phase="optimizer")])
def test_a_smaller_batch_is_not_recommended_for_the_optimizers_state(record: OomRecord) -> None:
    finding = diagnose(record)
    assert "backward" not in codes(finding)
    assert "validation" not in " ".join(step.text for step in finding.recommendations)


@pytest.mark.parametrize(
    ("record", "is_recommended"),
    [
        (PIECES, True),
        (replace(PIECES, allocator="expandable_segments:True,expandable_segments:False"), True),
        (replace(PIECES, allocator="max_split_size_mb:64,expandable_segments:True"), False),
    ],
)
def test_expandable_segments_are_recommended_unless_in_force(
    record: OomRecord, is_recommended: bool
) -> None:
    assert ("ALLOC_CONF" in codes(diagnose(record))) is is_recommended


OURS = {
    "batch_size": 64,
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
}
IN_FORCE = {"activation_checkpointing": True, "dataset_on_device": False, "precision": "bf16"}


def ours(**changes: Any) -> RunSetup:
    return RunSetup(on_gpu=True, own=True, config=OURS | changes, capability=(9, 0))


def named(finding: OomFinding) -> list[tuple[str | None, Any]]:
    return [(step.name, step.value) for step in finding.recommendations if step.name]


@pytest.mark.parametrize(
    ("record", "setup", "settings"),
    [
        (
            FULL,
            ours(),
            [("batch_size", 32), ("activation_checkpointing", True), ("precision", "bf16")],
        ),
        (FULL, ours(batch_size=1, **IN_FORCE), []),
        (
            FULL,
            replace(ours(batch_size=1), capability=(7, 0)),
            [("activation_checkpointing", True), ("precision", "fp16"),
             ("dataset_on_device", False)],
        ),
        (PIECES, ours(), [("preallocate_memory", True), ("copy_stream", False)]),
        (UPDATE, ours(), [("optimizer", "sgd")]),
        (OTHER, ours(), [("batch_size", 32), ("activation_checkpointing", True)]),
        (HOST_MEMORY, ours(), [("num_workers", 2), ("batch_size", 32)]),
        (
            OomRecord(ts=0.0, memory=MemoryKind.PINNED),
            ours(),
            [("copy_stream", False), ("non_blocking", False), ("pin_memory", False)],
        ),
    ],
)  # fmt: skip
def test_a_run_of_the_trainer_gets_settings(
    record: OomRecord, setup: RunSetup, settings: list[tuple[str, Any]]
) -> None:
    assert named(diagnose(record, setup)) == settings


def test_neither_impossible_nor_applied_settings_are_recommended() -> None:
    finding = diagnose(FULL, ours(), allowed=lambda name, value: name != "precision")
    assert named(finding)[2] == ("dataset_on_device", False)
    applied = RunSetup(on_gpu=True, own=False, applied=frozenset({"bf16"}))
    assert "autocast" in codes(diagnose(FULL))
    assert "autocast" not in codes(diagnose(FULL, applied))


# --- the file -------------------------------------------------------------------------------------

RICH = replace(
    LEAK,
    message="CUDA out of memory",
    holders=OTHER.holders,
    host=HostMemory(total=1, kills=0),
    allocator="a:b",
    stack=("train.py:3 step",),
)


def test_a_report_is_the_same_after_it_was_a_file(tmp_path: Path) -> None:
    report = OomReport(last=RICH, seen=3, ended=True)
    (tmp_path / "oom.json").write_text(json.dumps(asdict(report)))
    assert read_report(tmp_path) == report


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"last": None}, "oom.json.*last"),
        ({"last": {"ts": 1.0, "free": "x"}}, "last.free"),
        ({"last": {"ts": 1.0, "growth": {"first_step": 1}}}, "missing.*last.growth"),
    ],
)
def test_a_malformed_file_is_rejected_with_its_field(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    raw = asdict(OomReport(last=FULL)) | changes
    (tmp_path / "oom.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=words):
        read_report(tmp_path)


FIGURES = (
    "requested",
    "total",
    "allowed",
    "free",
    "allocated",
    "reserved",
    "others",
    "peak_allocated",
)
sizes = st.none() | st.integers(-5, 2**63 - 1)
levels = st.floats(-1e300, 1e300)


@settings(max_examples=300, deadline=None)
@given(
    figures=st.fixed_dictionaries(dict.fromkeys(FIGURES, sizes)),
    growth=st.none() | st.builds(GrowthTrend, st.integers(), st.integers(), levels, levels),
    steps=st.none() | st.integers(0, 200),
    phase=st.sampled_from([None, "forward", "optimizer"]),
)
def test_a_finding_is_complete_for_any_figures(
    figures: dict[str, Any],
    growth: GrowthTrend | None,
    steps: int | None,
    phase: str | None,
) -> None:
    record = replace(FULL, step=steps or 0, steps_done=steps, phase=phase, growth=growth)
    finding = diagnose(replace(record, **figures), ours())
    assert finding.text.endswith(".")
    assert finding.recommendations
