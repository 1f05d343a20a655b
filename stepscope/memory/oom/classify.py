"""Determine the cause of a failed allocation, with the figures that prove it; pure, no I/O.

Before torch gives up it returns every segment that is wholly free to the driver. So memory that is
still reserved and not allocated lies in pieces between tensors, or belongs to another stream or
pool. For a request R:

    R > room                        why it failed; room: bytes that the driver can still allocate
    R <= room + cached              fragmentation, if the process has held that much before
    R <= room + others              without the other processes it would fit
    else                            the training itself needs more than the device has: by a trend,
                                    in the optimizer's first step, or too large

In a step that was never completed free pieces prove nothing, as its peak is still to come: they are
a remark that follows "too big".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepscope.bottleneck.recommendations import Recommendation, RunSetup
from stepscope.common.formatting import format_bytes
from stepscope.memory.oom import evidence
from stepscope.memory.oom import recommendations as advice
from stepscope.memory.oom.evidence import FIRST_STEPS, OomFigures, OomTrend, usual_peak
from stepscope.memory.oom.record import HostMemory, MemoryKind, OomRecord, ProcessMemory

MIN_FRAGMENTED = 0.10  # Of the reserved memory in pieces: with less, the next allocation fails too.
MIN_OTHERS = 0.10  # Of the device, held by other processes: a desktop takes a few percent.
MIN_GROWN = 0.10  # Minimum growth of a trend that is the cause, as a fraction of the device.
MAX_UNKNOWN = 0.25
"""Maximum fraction of the device held outside torch by unknown processes for a definite cause: a
CUDA context and its libraries take less."""


class OomCause(StrEnum):
    """Why memory ran out; the value is the headline."""

    TOO_BIG = "Too large to fit"
    FRAGMENTATION = "Fragmentation"
    OTHER_PROCESS = "Another process"
    GROWTH = "Growth over steps"
    OPTIMIZER = "Optimizer state at the first step"
    HOST = "Host memory, not GPU memory"
    UNKNOWN = "No single cause"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomVerdict:
    """One sentence on why memory ran out, its evidence, and recommendations, the best first.

    `share` is the fraction of the device's memory that the cause is about; None if the cause is
    unknown or is about all of the memory.
    """

    case: OomCause
    text: str
    evidence: Mapping[str, str]
    next: tuple[Recommendation, ...] = ()
    share: float | None = None


@dataclass(frozen=True, slots=True)
class _Conclusion:
    case: OomCause
    text: str
    advice: advice.AdviceKind
    share: float | None = None
    has_pieces: bool = False


def judge(
    record: OomRecord,
    setup: RunSetup | None = None,
    *,
    growth: Mapping[str, Any] | None = None,
    allowed: advice.Allowed | None = None,
) -> OomVerdict:
    """Return the cause of a failed allocation, or abstain.

    `growth` is the data of the run's last `memory_growth` event. `allowed(field, value)` returns
    True if a setting is possible on this host.
    """
    figures = grown = None
    if record.memory is not MemoryKind.GPU:
        found = _host_cause(record)
    elif (figures := evidence.figures_of(record)) is None:
        text = "The allocator's counters were not recorded, so the cause is unknown."
        found = _Conclusion(OomCause.UNKNOWN, text, advice.smaller)
    else:
        grown = evidence.trend(record, growth)
        found = (
            _growth(figures, grown)
            or _fragmentation(record, figures)
            or _others(record, figures)
            or _optimizer(record, figures)
            or _too_big(record, figures)
            or _unknown(record, figures)
        )
    return OomVerdict(
        case=found.case,
        text=found.text,
        evidence=evidence.evidence_of(record, figures, grown),
        next=advice.steps_to_take(
            found.advice, record, setup, allowed, has_pieces=found.has_pieces
        ),
        share=None if found.share is None else round(min(1.0, max(0.0, found.share)), 4),
    )


def _growth(figures: OomFigures, trend: OomTrend | None) -> _Conclusion | None:
    grown = 0 if trend is None else min(trend.grown, figures.allocated)
    if trend is None or grown < max(figures.requested - figures.room, MIN_GROWN * figures.limit):
        return None
    text = (
        f"Allocated memory grew by {format_bytes(trend.per_step)} per step, by "
        f"{format_bytes(grown)} over {trend.steps:,} steps, until another "
        f"{format_bytes(figures.requested)} did not fit."
    )
    return _Conclusion(OomCause.GROWTH, text, advice.growth, grown / figures.limit)


def _fragmentation(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return fragmentation if only the place of free memory can have refused the allocation.

    In a step of a kind that was never completed free pieces prove nothing: the step frees and
    allocates more before it has its peak. The process must have held the demand before.
    """
    missing = figures.requested - figures.room
    done = record.steps_done or 0
    is_first = done < FIRST_STEPS and (done > 0 or record.phase is not None)
    was_held = figures.demand <= max(usual_peak(record) or 0, record.peak_allocated or 0)
    is_enough = figures.cached >= max(MIN_FRAGMENTED * figures.reserved, missing)
    if is_first or not was_held or not is_enough:
        return None
    share = figures.cached / figures.reserved
    text = (
        f"{format_bytes(figures.requested)} was requested, and {format_bytes(figures.cached)} of "
        f"the reserved memory was free ({100 * share:.0f}%), but not in one block that this "
        "allocation may use."
    )
    return _Conclusion(OomCause.FRAGMENTATION, text, advice.pieces, share)


def _others(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return "another process" if the request would fit without the other processes."""
    others = record.others
    if others is None:  # at least those whose memory is known
        others = sum(process.memory or 0 for process in record.processes)
    enough = max(figures.requested - figures.room, MIN_OTHERS * figures.limit)
    # At this process's own limit the end of others would change nothing.
    if figures.limit - figures.reserved < figures.requested or others < enough:
        return None
    text = (
        f"{_holders(record.processes)} {format_bytes(others)} of the GPU's "
        f"{format_bytes(record.total or figures.limit)}; without that, "
        f"{format_bytes(figures.requested)} would have fit."
    )
    return _Conclusion(OomCause.OTHER_PROCESS, text, advice.others, others / figures.limit)


def _holders(processes: tuple[ProcessMemory, ...]) -> str:
    """Return processes as the subject of a sentence, those with most memory first."""
    ranked = sorted(processes, key=lambda process: -(process.memory or 0))
    if not ranked:
        return "Another process holds"
    first = f"Process {ranked[0].pid}"
    named = f"{first} ({ranked[0].name})" if ranked[0].name else first
    return f"{named} holds" if len(ranked) == 1 else f"{named} and {len(ranked) - 1} more hold"


def _optimizer(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    if record.phase != "optimizer" or record.steps_done != 0:
        return None
    text = (
        "The optimizer creates its state in its first step, and "
        f"{format_bytes(figures.requested)} of that did not fit next to "
        f"{format_bytes(figures.allocated)} allocated."
    )
    return _Conclusion(OomCause.OPTIMIZER, text, advice.optimizer)


def _too_big(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return "too big" if the figures exclude everything else, also unknown processes."""
    limit, requested = format_bytes(figures.limit), format_bytes(figures.requested)
    room = figures.room + (figures.outside if _is_hidden(record, figures) else 0)
    if figures.requested <= min(room, figures.limit):
        return None
    done, held = record.steps_done or 0, usual_peak(record) or record.peak_allocated or 0
    has = f"the GPU has {limit}"
    if record.total is not None and figures.limit < record.total:
        has = f"this process may use {limit} of the GPU"
    if figures.requested > figures.limit:
        text = f"A single tensor of {requested} was requested: {has}."
    elif done < FIRST_STEPS:
        when = "" if record.steps_done is None else f"In step {done + 1} of this run, "
        if record.grad is False:
            when = "With gradients off, as in an evaluation, "
        text = (
            f"{when}{format_bytes(figures.allocated)} was in use and {requested} more was "
            f"requested: {has}."
        )
    elif 0 < held < figures.demand:
        text = (
            f"Up to {format_bytes(held)} was in use before, and this "
            f"{'evaluation' if record.grad is False else 'step'} needs at least "
            f"{format_bytes(figures.demand)}: {has}."
        )
    else:
        return None
    has_pieces = figures.requested - figures.cached <= figures.room < figures.requested
    if has_pieces:
        text += (
            f" Fragmentation may add to it: {format_bytes(figures.cached)} of the reserved memory "
            "was free, but not in one block."
        )
    return _Conclusion(OomCause.TOO_BIG, text, advice.smaller, has_pieces=has_pieces)


def _is_hidden(record: OomRecord, figures: OomFigures) -> bool:
    """Return True if much of the device is held outside torch, by unknown processes."""
    return record.others is None and figures.outside >= MAX_UNKNOWN * figures.limit


def _unknown(record: OomRecord, figures: OomFigures) -> _Conclusion:
    requested = format_bytes(figures.requested)
    if _is_hidden(record, figures):
        reason = record.others_reason or "the driver does not list processes"
        text = (
            f"{format_bytes(figures.outside)} of the GPU is held outside of PyTorch's memory, by "
            f"other processes or by libraries of this one ({reason.rstrip('.')})."
        )
    elif figures.requested <= figures.room:
        text = (
            f"{requested} was refused although {format_bytes(figures.room)} was free a moment "
            "later: the driver's memory may be fragmented, or another process was faster."
        )
    else:
        text = (
            f"{requested} more did not fit next to {format_bytes(figures.allocated)}; no single "
            "cause explains it."
        )
    return _Conclusion(OomCause.UNKNOWN, text, advice.smaller)


def _host_cause(record: OomRecord) -> _Conclusion:
    host = record.host or HostMemory()
    if record.memory is MemoryKind.PINNED:
        text = "The host could not pin more memory; GPU memory was not the limit."
        return _Conclusion(OomCause.HOST, text, advice.pinned)
    if host.kills:
        killed = "a process" if host.kills == 1 else f"{host.kills} processes"
        text = f"The kernel killed {killed} because this machine or container was out of memory."
        return _Conclusion(OomCause.HOST, text, advice.host)
    text = "The host ran out of memory"
    if record.requested is not None:
        text += f" for {format_bytes(record.requested)}"
    if host.available is not None and host.total is not None:
        text += f": {format_bytes(host.available)} of {format_bytes(host.total)} was available"
        if host.limit is not None and host.limit_used is not None:
            used, limit = format_bytes(host.limit_used), format_bytes(host.limit)
            text += f", {used} of the container's {limit} used"
    return _Conclusion(OomCause.HOST, f"{text}.", advice.host)
