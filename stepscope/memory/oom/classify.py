"""Name the cause of a failed allocation, with the figures that prove it. Pure.

Before torch gives up it returns every segment that is wholly free to the driver. So what is still
reserved and not allocated lies in pieces between tensors, and for a request R these hold:

    R > room                        why it failed; room is what the driver could still give
    R <= room + cached              fragmentation, if the process has held that much before
    R <= room + cached + others     without the other processes it would fit
    else                            the training itself needs more than there is

In a step that was never completed free pieces prove nothing, as its peak is still to come: they are
a remark that follows "too big". A whole free block of another stream or pool proves it at any time.

For the last line the steps before show what is new: a trend, a single step that needed far more, or
nothing, if the first step was never completed. If no line holds, or figures are missing, no case is
named and the verdict gives what is not known.
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
    OUTSIDE,
    OomFigures,
    OomTrend,
    evidence_of,
    figures_of,
    others_of,
    trend,
    usual_peak,
)
from stepscope.memory.oom.record import HostMemory, MemoryKind, OomRecord, ProcessMemory

FRAGMENTED = 0.10
"""Minimum share of the reserved memory that lies in pieces: below it, the same failure would follow
at the next allocation."""
OTHERS = 0.10
"""Minimum share of the device that other processes hold to be the cause: a desktop takes some per
cent."""
SPIKE = 1.25  # Minimum demand of an unusual step, as a multiple of the peak of the steps before.
GROWN = 0.10  # Minimum growth of a trend that is the cause, as a share of the device.
FULL = 0.80  # Share of the device filled by usual steps from which a little more is no spike.


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
    """One sentence on why memory ran out, what proves it and what to do, the best first.

    `share` is the part of the device's memory that the case is about, None if it is about all of
    it or no case is named.
    """

    case: OomCause
    text: str
    evidence: Mapping[str, str]
    next: tuple[advice.RemedyStep, ...] = ()
    share: float | None = None


@dataclass(frozen=True, slots=True)
class _OomCause:
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
    """Name the case of a failed allocation, or abstain.

    `setup` has the run's settings: for a run of ours the next steps are settings. `growth` is the
    data of the run's last `memory_growth` event. `allowed(field, value)` returns True if a setting
    is possible on this machine.
    """
    figures = found = remark = None
    if record.memory is not MemoryKind.GPU:
        cause = _host_cause(record)
    else:
        figures, found = figures_of(record), trend(record, growth)
        cause = _gpu_cause(record, figures, found)
        remark = _pieces_remark(record, figures, cause.case)
    share = cause.share
    return OomVerdict(
        case=cause.case,
        text=cause.text if remark is None else f"{cause.text} {remark}",
        evidence=evidence_of(record, figures, found),
        next=advice.steps_to_take(
            cause.advice, record, setup, allowed, has_pieces=remark is not None
        ),
        share=None if share is None else round(min(1.0, max(0.0, share)), 4),
    )


def _gpu_cause(record: OomRecord, figures: OomFigures | None, found: OomTrend | None) -> _OomCause:
    if figures is None:
        text = "The allocator's counters were not recorded, so the cause is unknown."
        return _OomCause(OomCause.UNKNOWN, text, advice.anything)
    return (
        _growth(figures, found)
        or _validation(record, figures)
        or _largest(record, figures)
        or _optimizer(record, figures)
        or _too_big(record, figures)
        or _unknown(record, figures)
    )


def _growth(figures: OomFigures, found: OomTrend | None) -> _OomCause | None:
    if found is None:
        return None
    grown = min(found.grown, figures.allocated)
    if grown < max(figures.requested - figures.room, GROWN * figures.limit):
        return None
    text = (
        f"Allocated memory grew by {format_bytes(found.per_step)} per step, by "
        f"{format_bytes(grown)} over {found.steps:,} steps, until another "
        f"{format_bytes(figures.requested)} did not fit."
    )
    return _OomCause(OomCause.GROWTH, text, advice.growth, grown / figures.limit)


def _validation(record: OomRecord, figures: OomFigures) -> _OomCause | None:
    """Name a validation that kept its activations, in another mode than the steps before it.

    Evaluation mode alone proves nothing: some scripts train in it.
    """
    more = _above_usual(record, figures)
    changed = record.training is False and record.training_at_steps is True
    is_validation = record.phase == "validation" and record.grad is True and changed
    if not more or not record.steps_done or not is_validation:
        return None
    where = f" (in {record.function})" if record.function else ""
    text = (
        f"Validation{where} ran with gradients on, so activations were kept: "
        f"{_needed(figures, more)}."
    )
    return _OomCause(OomCause.SPIKE, text, advice.no_grad, more / figures.limit)


def _needed(figures: OomFigures, more: int) -> str:
    return (
        f"{format_bytes(figures.demand)} was needed, versus at most "
        f"{format_bytes(figures.demand - more)} in earlier steps"
    )


def _largest(record: OomRecord, figures: OomFigures) -> _OomCause | None:
    """Name the one change that would have been enough; the largest if several would.

    Pieces count before an unusual step: they are named only if its demand is known to fit.
    """
    need = max(figures.requested, _state_left(record))
    pieces = _enough_in_pieces(record, figures, need)
    spike = 0 if pieces else _above_usual(record, figures)
    others = _enough_of_others(record, figures, need)
    most = max(spike, others, pieces)
    if most <= 0:
        return None
    if most == spike:
        where = f"In the {record.phase} of one step" if record.phase else "In one step"
        text = f"{where} {_needed(figures, spike)}."
        return _OomCause(OomCause.SPIKE, text, advice.long_batch, spike / figures.limit)
    if most == others:
        text = (
            f"{_holders(record.processes)} {format_bytes(others)} of the GPU's "
            f"{format_bytes(record.total or figures.limit)}; without that, "
            f"{format_bytes(figures.requested)} would have fit."
        )
        return _OomCause(OomCause.OTHER_PROCESS, text, advice.others, others / figures.limit)
    return _fragmentation(record, figures)


def _above_usual(record: OomRecord, figures: OomFigures) -> int:
    usual = usual_peak(record)
    return 0 if usual is None or figures.demand < SPIKE * usual else figures.demand - usual


def _enough_of_others(record: OomRecord, figures: OomFigures, need: int) -> int:
    others = others_of(record, figures) or 0
    own_limit = figures.limit - figures.reserved < need  # their end would change nothing
    enough = max(need - figures.room, OTHERS * figures.limit)
    return 0 if own_limit or others < enough else others


def _enough_in_pieces(record: OomRecord, figures: OomFigures, need: int) -> int:
    """Return the bytes in pieces if only the place of free memory can have refused the allocation.

    In a step of a kind that was never completed free pieces prove nothing: the step frees and
    allocates more before it has its peak. The process must have held the demand before.
    """
    if figures.cached < max(FRAGMENTED * figures.reserved, need - figures.room):
        return 0
    done = record.steps_done or 0
    if not _is_elsewhere(record, figures):
        if done < FIRST_STEPS and (done or record.phase is not None):
            return 0
        if figures.demand > max(usual_peak(record) or 0, record.peak_allocated or 0):
            return 0
    return figures.cached


def _is_elsewhere(record: OomRecord, figures: OomFigures) -> bool:
    """Return True if a block of another stream or pool is large enough."""
    return record.segments is not None and record.segments.elsewhere >= figures.requested


def _holders(processes: tuple[ProcessMemory, ...]) -> str:
    """Return processes as the subject of a sentence, those with most memory first."""
    ranked = sorted(processes, key=lambda one: -(one.memory or 0))
    named = [f"{one.name or 'a process'} (process {one.pid})" for one in ranked[:2]]
    if len(ranked) > 2:
        named.append(f"{len(ranked) - 2} more")
    *first, last = named or ["another process"]
    text = f"{', '.join(first)} and {last} hold" if first else f"{last} holds"
    return text[0].upper() + text[1:] if text.startswith(("a process", "another")) else text


def _fragmentation(record: OomRecord, figures: OomFigures) -> _OomCause:
    share, segments = figures.cached / figures.reserved, record.segments
    if segments is not None and _is_elsewhere(record, figures):
        whose = "another stream"
        if segments.private >= figures.requested:
            whose = "a private pool, such as that of a CUDA graph,"
        text = (
            f"A free block of {format_bytes(segments.elsewhere)} could take the requested "
            f"{format_bytes(figures.requested)}, but it belongs to {whose} which alone may use "
            "it."
        )
        return _OomCause(OomCause.FRAGMENTATION, text, advice.streams, share)
    text = (
        f"{format_bytes(figures.requested)} was asked for, and "
        f"{_free_in_pieces(record, figures)} ({100 * share:.0f} % of it is split off)."
    )
    return _OomCause(OomCause.FRAGMENTATION, text, advice.pieces, share)


def _pieces_remark(record: OomRecord, figures: OomFigures | None, case: OomCause) -> str | None:
    """Return what fragmentation adds to another case; None if it adds nothing."""
    if figures is None or case not in (OomCause.TOO_BIG, OomCause.SPIKE):
        return None
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


def _state_left(record: OomRecord) -> int:
    """Return the bytes of optimizer state that were still to come, 0 if not known."""
    state = record.optimizer
    if record.phase != "optimizer" or state is None or state.expected is None:
        return 0
    return max(0, state.expected - state.state)


def _optimizer(record: OomRecord, figures: OomFigures) -> _OomCause | None:
    if record.phase != "optimizer" or record.steps_done != 0:
        return None
    state, requested, share = record.optimizer, format_bytes(figures.requested), None
    if state is None:
        text = (
            f"The optimizer creates its state in its first step, and {requested} of that did not "
            f"fit next to {format_bytes(figures.allocated)} allocated."
        )
    elif state.expected is not None and state.state >= state.expected:
        share = state.state / figures.limit
        text = (
            f"The state of {state.name}, {format_bytes(state.state)}, was complete; its first "
            f"update needed another {requested}, as for copies of the gradients."
        )
    else:
        keeps = "keeps state"
        if state.expected is not None:
            keeps = f"keeps {format_bytes(state.expected)} of state"
            share = state.expected / figures.limit
        text = (
            f"{state.name} {keeps} for {format_bytes(state.parameters)} of parameters; its first "
            f"step creates it, and {format_bytes(state.state)} existed when another "
            f"{requested} did not fit."
        )
    return _OomCause(OomCause.OPTIMIZER, text, advice.optimizer, share)


def _too_big(record: OomRecord, figures: OomFigures) -> _OomCause | None:
    """Name it if the figures leave nothing else: not if somebody else may hold the memory."""
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
            f"{when}{format_bytes(figures.allocated)} was in use and {requested} more was asked "
            f"for: {has}."
        )
    elif is_full or 0 < held < figures.demand:
        left = ", too close to the limit for the differences between steps" if is_full else ""
        text = (
            f"Up to {format_bytes(held)} was in use before, and this step needs at least "
            f"{format_bytes(figures.demand)}: {has}{left}."
        )
    else:
        return None
    return _OomCause(OomCause.TOO_BIG, text, advice.smaller)


def _is_hidden(record: OomRecord, figures: OomFigures) -> bool:
    """Return True if much of the device is held outside torch, by unknown processes."""
    return others_of(record, figures) is None and figures.outside >= OUTSIDE * figures.limit


def _unknown(record: OomRecord, figures: OomFigures) -> _OomCause:
    requested = format_bytes(figures.requested)
    if _is_hidden(record, figures):
        why = record.others_reason or "the driver does not say whose"
        text = (
            f"{format_bytes(figures.outside)} of the GPU is held outside of PyTorch's memory, by "
            f"other processes or by libraries of this one ({why.rstrip('.')})."
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
    return _OomCause(OomCause.UNKNOWN, text, advice.anything)


def _host_cause(record: OomRecord) -> _OomCause:
    host = record.host or HostMemory()
    if record.memory is MemoryKind.PINNED:
        text = "The host could not pin more memory; GPU memory was not the limit."
        return _OomCause(OomCause.HOST, text, advice.pinned)
    if advice.is_beyond_host(record):
        text = (
            f"One allocation of {format_bytes(record.requested)} was requested, more than the host "
            "has in all."
        )
    elif host.kills:
        what = "a process" if host.kills == 1 else f"{host.kills} processes"
        text = f"The kernel killed {what} because this machine or container was out of memory."
    else:
        left = ""
        if host.available is not None and host.total is not None:
            left = f": {format_bytes(host.available)} of {format_bytes(host.total)} was available"
            if host.limit is not None and host.limit_used is not None:
                used = f"{format_bytes(host.limit_used)} of the container's"
                left += f", {used} {format_bytes(host.limit)} used"
        asked = f" for {format_bytes(record.requested)}" if record.requested else ""
        text = f"The host ran out of memory{asked}{left}."
    return _OomCause(OomCause.HOST, text, advice.host)
