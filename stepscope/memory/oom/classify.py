"""Determine the cause of a failed allocation, with the figures that prove it; pure, no I/O.

Before torch gives up it returns every segment that is wholly free to the driver. So memory that is
still reserved and not allocated lies in pieces between tensors, and for a request R:

    R > room                        why it failed; room: bytes that the driver can still allocate
    R <= room + cached              fragmentation, if the process has held that much before
    R <= room + cached + others     without the other processes it would fit
    else                            the training itself needs more than the device has: by a trend,
                                    in a single step, or from the first step on

In a step that was never completed free pieces prove nothing, as its peak is still to come: they are
a remark that follows "too big". A whole free block of another stream or pool proves it at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepscope.bottleneck.recommendations import RunSetup
from stepscope.common.formatting import format_bytes
from stepscope.memory.oom import recommendations as advice
from stepscope.memory.oom.evidence import (
    FIRST_STEPS,
    OomFigures,
    OomTrend,
    evidence_of,
    figures_of,
    others_of,
    trend,
    usual_peak,
)
from stepscope.memory.oom.record import HostMemory, MemoryKind, OomRecord, ProcessMemory

MIN_FRAGMENTED = 0.10
"""Minimum fraction of the reserved memory in pieces: with less, the next allocation fails too."""
MIN_OTHERS = 0.10
"""Minimum fraction of the device that other processes hold: a desktop takes a few percent."""
MIN_GROWN = 0.10  # Minimum growth of a trend that is the cause, as a fraction of the device.
MIN_SPIKE = 1.25  # Minimum demand of an unusual step, as a multiple of the earlier steps' peak.
FULL = 0.80  # Fraction of the device in usual steps above which a little more is no spike.
MAX_UNKNOWN = 0.25
"""Maximum fraction of the device held outside torch by unknown processes for a definite cause: a
CUDA context and its libraries take less."""


class OomCause(StrEnum):
    """Why memory ran out; the value is the headline."""

    TOO_BIG = "Too large to fit"
    FRAGMENTATION = "Fragmentation"
    OTHER_PROCESS = "Another process"
    GROWTH = "Growth over steps"
    SPIKE = "One-off spike"
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
    next: tuple[advice.RemedyStep, ...] = ()
    share: float | None = None


@dataclass(frozen=True, slots=True)
class _Conclusion:
    case: OomCause
    text: str
    advice: advice.AdviceKind
    share: float | None = None


def judge(
    record: OomRecord,
    setup: RunSetup | None = None,
    *,
    growth: Mapping[str, Any] | None = None,
    allowed: advice.Allowed | None = None,
) -> OomVerdict:
    """Return the cause of a failed allocation, or abstain.

    `setup` has the run's settings: a run of the trainer gets settings as recommendations. `growth`
    is the data of the run's last `memory_growth` event. `allowed(field, value)` returns True if a
    setting is possible on this host.
    """
    figures = grown = remark = None
    if record.memory is not MemoryKind.GPU:
        found = _host_cause(record)
    elif (figures := figures_of(record)) is None:
        text = "The allocator's counters were not recorded, so the cause is unknown."
        found = _Conclusion(OomCause.UNKNOWN, text, advice.anything)
        grown = trend(record, growth)
    else:
        grown = trend(record, growth)
        found = (
            _growth(figures, grown)
            or _largest(record, figures)
            or _optimizer(record, figures)
            or _too_big(record, figures)
            or _unknown(record, figures)
        )
        if found.case in (OomCause.TOO_BIG, OomCause.SPIKE):
            remark = _pieces_remark(record, figures)
    return OomVerdict(
        case=found.case,
        text=found.text if remark is None else f"{found.text} {remark}",
        evidence=evidence_of(record, figures, grown),
        next=advice.steps_to_take(
            found.advice, record, setup, allowed, has_pieces=remark is not None
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


def _largest(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return the one change that would have been enough; the largest if several would.

    Pieces count before an unusual step: they are the cause only if its demand is known to fit. A
    validation with gradients counts before everything else.
    """
    above = _above_usual(record, figures)
    if above and _keeps_activations(record):
        return _spike(record, figures, above)
    pieces = figures.cached if _is_fragmented(record, figures) else 0
    spike = 0 if pieces else above
    others = _enough_of_others(record, figures)
    most = max(spike, others, pieces)
    if most <= 0:
        return None
    if most == spike:
        return _spike(record, figures, spike)
    if most == pieces:
        return _fragmentation(record, figures)
    text = (
        f"{_holders(record.processes)} {format_bytes(others)} of the GPU's "
        f"{format_bytes(record.total or figures.limit)}; without that, "
        f"{format_bytes(figures.requested)} would have fit."
    )
    return _Conclusion(OomCause.OTHER_PROCESS, text, advice.others, others / figures.limit)


def _above_usual(record: OomRecord, figures: OomFigures) -> int:
    usual = usual_peak(record)
    return 0 if usual is None or figures.demand < MIN_SPIKE * usual else figures.demand - usual


def _keeps_activations(record: OomRecord) -> bool:
    """Return True for a validation with gradients, in another mode than the steps before.

    Evaluation mode alone proves nothing: some scripts train in evaluation mode.
    """
    changed = record.training is False and record.training_at_steps is True
    return record.phase == "validation" and record.grad is True and changed


def _spike(record: OomRecord, figures: OomFigures, above: int) -> _Conclusion:
    needed = (
        f"{format_bytes(figures.demand)} was needed, versus at most "
        f"{format_bytes(figures.demand - above)} in earlier steps."
    )
    if _keeps_activations(record):
        where = f" (in {record.function})" if record.function else ""
        text = f"Validation{where} ran with gradients on, so activations were kept: {needed}"
        return _Conclusion(OomCause.SPIKE, text, advice.no_grad, above / figures.limit)
    where = f"In the {record.phase} of one step" if record.phase else "In one step"
    text = f"{where} {needed}"
    return _Conclusion(OomCause.SPIKE, text, advice.long_batch, above / figures.limit)


def _enough_of_others(record: OomRecord, figures: OomFigures) -> int:
    others, need, state = others_of(record, figures) or 0, figures.requested, record.optimizer
    if record.phase == "optimizer" and state is not None and state.expected is not None:
        need = max(need, state.expected - state.state)  # the rest of the state follows
    # At this process's own limit the end of others would change nothing.
    own_limit = figures.limit - figures.reserved < need
    enough = max(need - figures.room, MIN_OTHERS * figures.limit)
    return 0 if own_limit or others < enough else others


def _is_fragmented(record: OomRecord, figures: OomFigures) -> bool:
    """Return True if only the place of free memory can have refused the allocation.

    In a step of a kind that was never completed free pieces prove nothing: the step frees and
    allocates more before it has its peak. The process must have held the demand before.
    """
    missing = figures.requested - figures.room
    if figures.cached < max(MIN_FRAGMENTED * figures.reserved, missing):
        return False
    done = record.steps_done or 0
    if _is_elsewhere(record, figures):
        return True
    if done < FIRST_STEPS and (done or record.phase is not None):
        return False
    return figures.demand <= max(usual_peak(record) or 0, record.peak_allocated or 0)


def _is_elsewhere(record: OomRecord, figures: OomFigures) -> bool:
    """Return True if a block of another stream or pool is large enough."""
    return record.segments is not None and record.segments.elsewhere >= figures.requested


def _holders(processes: tuple[ProcessMemory, ...]) -> str:
    """Return processes as the subject of a sentence, those with most memory first."""
    ranked = sorted(processes, key=lambda process: -(process.memory or 0))
    named = [f"{process.name or 'a process'} (process {process.pid})" for process in ranked[:2]]
    if len(ranked) > 2:
        named.append(f"{len(ranked) - 2} more")
    *first, last = named or ["another process"]
    text = f"{', '.join(first)} and {last} hold" if first else f"{last} holds"
    return text[0].upper() + text[1:] if text.startswith(("a process", "another")) else text


def _fragmentation(record: OomRecord, figures: OomFigures) -> _Conclusion:
    share, segments = figures.cached / figures.reserved, record.segments
    if segments is not None and _is_elsewhere(record, figures):
        owner = "another stream"
        if segments.private >= figures.requested:
            owner = "a private pool, such as that of a CUDA graph,"
        text = (
            f"A free block of {format_bytes(segments.elsewhere)} could take the requested "
            f"{format_bytes(figures.requested)}, but it belongs to {owner} which alone may use it."
        )
        return _Conclusion(OomCause.FRAGMENTATION, text, advice.streams, share)
    text = (
        f"{format_bytes(figures.requested)} was requested, and "
        f"{_free_in_pieces(record, figures)} ({100 * share:.0f}% of it is split off)."
    )
    return _Conclusion(OomCause.FRAGMENTATION, text, advice.pieces, share)


def _pieces_remark(record: OomRecord, figures: OomFigures) -> str | None:
    """Return the part of fragmentation in another cause; None without one."""
    if not figures.requested - figures.cached <= figures.room < figures.requested:
        return None
    return (
        f"Fragmentation may add to it: {_free_in_pieces(record, figures)}, and "
        f"{format_bytes(figures.room)} on the device. In one block that would be enough for this "
        "allocation; what the rest of the step needs is unknown."
    )


def _free_in_pieces(record: OomRecord, figures: OomFigures) -> str:
    where = ""
    if record.segments is not None:
        where = f" in pieces of at most {format_bytes(record.segments.largest_free)}"
    return f"{format_bytes(figures.cached)} of the reserved memory was free{where}"


def _optimizer(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    if record.phase != "optimizer" or record.steps_done != 0:
        return None
    state, requested, size = record.optimizer, format_bytes(figures.requested), None
    if state is None:
        text = (
            f"The optimizer creates its state in its first step, and {requested} of that did not "
            f"fit next to {format_bytes(figures.allocated)} allocated."
        )
    else:
        size = state.expected
        kept = "state" if size is None else f"{format_bytes(size)} of state"
        text = (
            f"{state.name} keeps {kept} for {format_bytes(state.parameters)} of parameters; its "
            f"first step creates it, and {format_bytes(state.state)} existed when another "
            f"{requested} did not fit."
        )
    share = None if size is None else size / figures.limit
    return _Conclusion(OomCause.OPTIMIZER, text, advice.optimizer, share)


def _too_big(record: OomRecord, figures: OomFigures) -> _Conclusion | None:
    """Return "too big" if the figures exclude everything else, also unknown processes."""
    limit, requested = format_bytes(figures.limit), format_bytes(figures.requested)
    room = figures.room + (figures.outside if _is_hidden(record, figures) else 0)
    if figures.requested <= min(room, figures.limit):
        return None
    usual, done = usual_peak(record), record.steps_done or 0
    is_full = usual is not None and usual >= FULL * (figures.limit - figures.outside)
    held = usual or record.peak_allocated or 0
    has = f"the GPU has {limit}"
    if record.total is not None and figures.limit < record.total:
        has = f"this process may use {limit} of the GPU"
    if figures.requested > figures.limit:
        text = (
            f"A single tensor of {requested} was requested, more than the {limit} this process "
            "can have on the GPU."
        )
    elif done < FIRST_STEPS:
        step = ("first", "second")[done]
        when = "" if record.steps_done is None else f"Before the {step} step was complete "
        text = (
            f"{when}{format_bytes(figures.allocated)} was in use and {requested} more was "
            f"requested: {has}."
        )
    elif is_full or 0 < held < figures.demand:
        left = ", too close to the limit for the differences between steps" if is_full else ""
        text = (
            f"Up to {format_bytes(held)} was in use before, and this step needs at least "
            f"{format_bytes(figures.demand)}: {has}{left}."
        )
    else:
        return None
    return _Conclusion(OomCause.TOO_BIG, text, advice.smaller)


def _is_hidden(record: OomRecord, figures: OomFigures) -> bool:
    """Return True if much of the device is held outside torch, by unknown processes."""
    return others_of(record, figures) is None and figures.outside >= MAX_UNKNOWN * figures.limit


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
            f"{requested} more did not fit next to {format_bytes(figures.allocated)}; the need of "
            "earlier steps was not recorded."
        )
    return _Conclusion(OomCause.UNKNOWN, text, advice.anything)


def _host_cause(record: OomRecord) -> _Conclusion:
    host, size = record.host or HostMemory(), format_bytes(record.requested or 0)
    if record.memory is MemoryKind.PINNED:
        text = "The host could not pin more memory; GPU memory was not the limit."
        return _Conclusion(OomCause.HOST, text, advice.pinned)
    if advice.is_beyond_host(record):
        text = f"One allocation of {size} was requested, more than the host has in all."
    elif host.kills:
        killed = "a process" if host.kills == 1 else f"{host.kills} processes"
        text = f"The kernel killed {killed} because this machine or container was out of memory."
    else:
        text = (
            f"The host ran out of memory for {size}"
            if record.requested
            else ("The host ran out of memory")
        )
        if host.available is not None and host.total is not None:
            text += f": {format_bytes(host.available)} of {format_bytes(host.total)} was available"
            if host.limit is not None and host.limit_used is not None:
                used, limit = format_bytes(host.limit_used), format_bytes(host.limit)
                text += f", {used} of the container's {limit} used"
        text += "."
    return _Conclusion(OomCause.HOST, text, advice.host)
