"""Why memory ran out, in one verdict with the figures that prove it. Pure: a record in, words out.

Before torch gives up it returns every segment that is wholly free to the driver. So what is still
reserved and not allocated lies in pieces between tensors, and for a request R these hold:

    R > room                        why it failed; room is what the driver could still give
    R <= room + cached              fragmentation, if the process has held that much before
    R <= room + cached + others     without the other processes it would fit
    else                            the training itself needs more than there is

In a step that was never completed free pieces prove nothing, as its peak is still to come: they are
a remark that follows "too big". A whole free block of another stream or pool proves it at any time.

For the last line the steps before tell what is new: a trend, a single step that needed far more, or
nothing, where the first step was never completed. Where no line holds, or the figures are missing,
no case is named and the verdict says what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepscope.bottleneck.recommendations import RunSetup
from stepscope.common.formatting import format_bytes
from stepscope.memory.oom.evidence import (
    FIRST_STEPS,
    OUTSIDE,
    AllocationTrend,
    OomEvidence,
    OomMemoryStats,
    evaluates_with_gradients,
    figures_of,
    gpu_evidence,
    host_evidence,
    others_of,
    trend,
    usual_peak,
)
from stepscope.memory.oom.recommendations import (
    AdviceKind,
    Allowed,
    OomRecommendation,
    is_beyond_host,
    steps_to_take,
)
from stepscope.memory.oom.record import (
    MemoryKind,
    OomRecord,
    OomReport,
    ProcessMemory,
    oom_name,
    parse,
)

FRAGMENTED = 0.10
"""Least share of the reserved memory that lies in pieces: below it, tidying up would only put the
same failure off to the next allocation."""
OTHERS = 0.10
"""Least share of the device that other processes hold before they are named as the cause: a desktop
or a monitor alone takes some per cent."""
SPIKE = 1.25
"""Ratio of what a step needed to the peak of the steps before from which it is one of its kind."""
GROWN = 0.10
"""Least share of the device that has to have grown before a trend is the cause."""
FULL = 0.80
"""Share of the device that usual steps fill, from which a little more is no spike."""


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


CauseCandidate = tuple[OomCause, str, float | None, AdviceKind]


def gpu_case(
    record: OomRecord, figures: OomMemoryStats | None, found: AllocationTrend | None
) -> CauseCandidate:
    if figures is None:
        text = "The allocator's counters were not recorded, so the cause is unknown."
        return OomCause.UNKNOWN, text, None, AdviceKind.ANY
    return (
        _growth(figures, found)
        or _validation(record, figures)
        or _largest(record, figures)
        or _optimizer(record, figures)
        or _too_big(record, figures)
        or _unknown(record, figures)
    )


def _growth(figures: OomMemoryStats, found: AllocationTrend | None) -> CauseCandidate | None:
    if found is None:
        return None
    grown = min(found.grown, figures.allocated)
    missing = figures.requested - figures.room
    if grown < max(missing, GROWN * figures.limit):
        return None
    text = (
        f"Allocated memory grew by {format_bytes(found.per_step)} per step, by "
        f"{format_bytes(grown)} over {found.steps:,} steps, until another "
        f"{format_bytes(figures.requested)} did not fit."
    )
    return OomCause.GROWTH, text, grown / figures.limit, AdviceKind.GROWTH


def _validation(record: OomRecord, figures: OomMemoryStats) -> CauseCandidate | None:
    """Name it where steps had fitted, and the validation after them kept its activations."""
    if not record.steps_done or not evaluates_with_gradients(record):
        return None
    where = f" (in {record.function})" if record.function else ""
    kept = f"Validation{where} ran with gradients on, so activations were kept"
    more = _above_usual(record, figures)
    if not more:
        return None
    text = f"{kept}: {_needed(figures, figures.demand - more)}."
    return OomCause.SPIKE, text, more / figures.limit, AdviceKind.NO_GRAD


def _needed(figures: OomMemoryStats, usual: int) -> str:
    return (
        f"{format_bytes(figures.demand)} was needed, versus at most {format_bytes(usual)} in "
        "earlier steps"
    )


def _largest(record: OomRecord, figures: OomMemoryStats) -> CauseCandidate | None:
    """Name the one change that would have been enough; the largest if several would.

    Pieces count before an unusual step: they are named only where its demand is known to fit.
    """
    need = max(figures.requested, _state_left(record))
    pieces = _enough_in_pieces(figures, need) if _is_known_to_fit(record, figures) else 0
    sizes = {
        _spike: 0 if pieces else _above_usual(record, figures),
        _other_process: _enough_of_others(record, figures, need),
        _fragmentation: pieces,
    }
    name, size = max(sizes.items(), key=lambda item: item[1])
    return name(record, figures, size) if size > 0 else None


def _above_usual(record: OomRecord, figures: OomMemoryStats) -> int:
    usual = usual_peak(record)
    if usual is None or figures.demand < SPIKE * usual:
        return 0
    return figures.demand - usual


def _enough_of_others(record: OomRecord, figures: OomMemoryStats, need: int) -> int:
    others = others_of(record, figures) or 0
    own_limit = figures.limit - figures.reserved < need  # their end would change nothing
    if own_limit or others < max(need - figures.room, OTHERS * figures.limit):
        return 0
    return others


def _enough_in_pieces(figures: OomMemoryStats, need: int) -> int:
    little = figures.cached < FRAGMENTED * figures.reserved
    return 0 if little or figures.cached < need - figures.room else figures.cached


def _is_known_to_fit(record: OomRecord, figures: OomMemoryStats) -> bool:
    """Return True if nothing but the place of free memory can have refused the allocation.

    In a step of a kind that was never completed free pieces prove nothing: the step frees and
    allocates more before it has its peak. The process must have held the demand before.
    """
    segments, done = record.segments, record.steps_done or 0
    if segments is not None and segments.elsewhere >= figures.requested:
        return True
    if done < FIRST_STEPS and (done or record.phase is not None):
        return False
    return figures.demand <= max(usual_peak(record) or 0, record.peak_allocated or 0)


def _spike(record: OomRecord, figures: OomMemoryStats, more: int) -> CauseCandidate:
    usual = figures.demand - more
    where = f"In the {record.phase} of one step" if record.phase else "In one step"
    text = f"{where} {_needed(figures, usual)}."
    return OomCause.SPIKE, text, more / figures.limit, AdviceKind.LONG_BATCH


def _other_process(record: OomRecord, figures: OomMemoryStats, others: int) -> CauseCandidate:
    who = holders(record.processes)
    text = (
        f"{who} {'hold' if len(record.processes) > 1 else 'holds'} {format_bytes(others)} of "
        f"the GPU's {format_bytes(record.total or figures.limit)}; without that, "
        f"{format_bytes(figures.requested)} would have fit."
    )
    return OomCause.OTHER_PROCESS, text, others / figures.limit, AdviceKind.OTHERS


def holders(processes: tuple[ProcessMemory, ...], most: int = 2) -> str:
    """Return processes as the subject of a sentence, those with most memory first."""
    ranked = sorted(processes, key=lambda one: -(one.memory or 0))
    named = [f"{one.name or 'a process'} (process {one.pid})" for one in ranked[:most]]
    if len(ranked) > most:
        named.append(f"{len(ranked) - most} more")
    if not named:
        return "Another process"
    text = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    return text[0].upper() + text[1:] if text.startswith("a process") else text


def _fragmentation(record: OomRecord, figures: OomMemoryStats, pieces: int) -> CauseCandidate:
    share = pieces / figures.reserved
    segments = record.segments
    if segments is not None and segments.elsewhere >= figures.requested:
        whose = (
            "a private pool, such as that of a CUDA graph,"
            if segments.private >= figures.requested
            else "another stream"
        )
        text = (
            f"A free block of {format_bytes(segments.elsewhere)} could take the requested "
            f"{format_bytes(figures.requested)}, but it belongs to {whose} which alone may use "
            "it."
        )
        return OomCause.FRAGMENTATION, text, share, AdviceKind.STREAMS
    free = _free_in_pieces(record, pieces)
    text = (
        f"{format_bytes(figures.requested)} was asked for, and {free} "
        f"({100 * share:.0f} % of it is split off)."
    )
    return OomCause.FRAGMENTATION, text, share, AdviceKind.PIECES


def pieces_remark(record: OomRecord, figures: OomMemoryStats | None, case: OomCause) -> str | None:
    """Return what fragmentation adds to a case that is another one; None where it adds nothing."""
    if figures is None or case not in (OomCause.TOO_BIG, OomCause.SPIKE):
        return None
    if not figures.requested - figures.cached <= figures.room < figures.requested:
        return None
    return (
        f"Fragmentation may add to it: {_free_in_pieces(record, figures.cached)}, and "
        f"{format_bytes(figures.room)} on the device. In one block that would be enough for this "
        "allocation; what the rest of the step needs is unknown."
    )


def _free_in_pieces(record: OomRecord, pieces: int) -> str:
    where = ""
    if record.segments is not None:
        where = f" in pieces of at most {format_bytes(record.segments.largest_free)}"
    return f"{format_bytes(pieces)} of the reserved memory was free{where}"


def _state_left(record: OomRecord) -> int:
    """Return the bytes of optimizer state that were still to come, 0 where it is not known."""
    state = record.optimizer
    if record.phase != "optimizer" or state is None or state.expected is None:
        return 0
    return max(0, state.expected - state.state)


def _optimizer(record: OomRecord, figures: OomMemoryStats) -> CauseCandidate | None:
    if record.phase != "optimizer" or record.steps_done != 0:
        return None
    state = record.optimizer
    if state is None:
        text = (
            "The optimizer creates its state in its first step, and "
            f"{format_bytes(figures.requested)} of that did not fit next to "
            f"{format_bytes(figures.allocated)} allocated."
        )
        return OomCause.OPTIMIZER, text, None, AdviceKind.OPTIMIZER
    if state.expected is not None and state.state >= state.expected:
        text = (
            f"The state of {state.name}, {format_bytes(state.state)}, was complete; its first "
            f"update needed another {format_bytes(figures.requested)}, as for copies of the "
            "gradients."
        )
        return OomCause.OPTIMIZER, text, state.state / figures.limit, AdviceKind.OPTIMIZER
    if state.expected is None:
        keeps = "keeps state"
    else:
        keeps = f"keeps {format_bytes(state.expected)} of state"
    text = (
        f"{state.name} {keeps} for {format_bytes(state.parameters)} of parameters; its first "
        f"step creates it, and {format_bytes(state.state)} existed when another "
        f"{format_bytes(figures.requested)} did not fit."
    )
    share = None if state.expected is None else state.expected / figures.limit
    return OomCause.OPTIMIZER, text, share, AdviceKind.OPTIMIZER


def _too_big(record: OomRecord, figures: OomMemoryStats) -> CauseCandidate | None:
    """Name it where the figures leave nothing else: not where somebody else may hold the memory."""
    if figures.requested > figures.limit:
        text = (
            f"A single tensor of {format_bytes(figures.requested)} was requested, more than the "
            f"{format_bytes(figures.limit)} this process can have on the GPU."
        )
        return OomCause.TOO_BIG, text, None, AdviceKind.SMALLER
    others = others_of(record, figures)
    hidden = others is None and figures.outside >= OUTSIDE * figures.limit
    if figures.requested <= figures.room + (figures.outside if hidden else 0):
        return None
    usual = usual_peak(record)
    has = f"the GPU has {format_bytes(figures.limit)}"
    if record.total is not None and figures.limit < record.total:
        has = f"this process may use {format_bytes(figures.limit)} of the GPU"
    asked = (
        f"{format_bytes(figures.allocated)} was in use and {format_bytes(figures.requested)} more "
        "was asked for"
    )
    done = record.steps_done or 0
    if done < FIRST_STEPS:
        which = ("first", "second")[done]
        when = "" if record.steps_done is None else f"Before the {which} step was complete "
        return OomCause.TOO_BIG, f"{when}{asked}: {has}.", None, AdviceKind.SMALLER
    is_full = usual is not None and usual >= FULL * (figures.limit - figures.outside)
    held = usual or record.peak_allocated or 0
    if is_full or 0 < held < figures.demand:
        left = ", too close to the limit for the differences between steps" if is_full else ""
        text = (
            f"Up to {format_bytes(held)} was in use before, and this step needs at least "
            f"{format_bytes(figures.demand)}: {has}{left}."
        )
        return OomCause.TOO_BIG, text, None, AdviceKind.SMALLER
    return None


def _unknown(record: OomRecord, figures: OomMemoryStats) -> CauseCandidate:
    """Abstain, and say what is not known."""
    if others_of(record, figures) is None and figures.outside >= OUTSIDE * figures.limit:
        why = record.others_reason or "the driver does not say whose"
        text = (
            f"{format_bytes(figures.outside)} of the GPU is held outside of PyTorch's memory, by "
            f"other processes or by libraries of this one ({why.rstrip('.')})."
        )
    elif figures.requested <= figures.room:
        text = (
            f"{format_bytes(figures.requested)} was refused although "
            f"{format_bytes(figures.room)} was free a moment later: the driver's memory may be "
            "fragmented, or another process was faster."
        )
    else:
        text = (
            f"{format_bytes(figures.requested)} more did not fit next to "
            f"{format_bytes(figures.allocated)}; the need of earlier steps was not recorded."
        )
    return OomCause.UNKNOWN, text, None, AdviceKind.ANY


def host_case(record: OomRecord) -> CauseCandidate:
    host = record.host
    if record.memory is MemoryKind.PINNED:
        text = "The host could not pin more memory; GPU memory was not the limit."
        return OomCause.HOST, text, None, AdviceKind.PINNED
    if is_beyond_host(record):
        text = f"One allocation of {format_bytes(record.requested)} was requested, more than "
        return OomCause.HOST, text + "the host has in all.", None, AdviceKind.HOST
    if host is not None and host.kills:
        what = "a process" if host.kills == 1 else f"{host.kills} processes"
        text = f"The kernel killed {what} because this machine or container was out of memory."
        return OomCause.HOST, text, None, AdviceKind.HOST
    left = ""
    if host is not None and host.available is not None and host.total is not None:
        left = f": {format_bytes(host.available)} of {format_bytes(host.total)} was available"
        if host.limit is not None and host.limit_used is not None:
            used = f"{format_bytes(host.limit_used)} of the container's"
            left += f", {used} {format_bytes(host.limit)} used"
    asked = f" for {format_bytes(record.requested)}" if record.requested else ""
    return OomCause.HOST, f"The host ran out of memory{asked}{left}.", None, AdviceKind.HOST


__all__ = [
    "OomCause",
    "OomEvidence",
    "OomRecord",
    "OomReport",
    "OomVerdict",
    "judge",
    "oom_name",
    "parse",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OomVerdict:
    """One sentence on why memory ran out, what proves it and what to do, the best first.

    `share` is the part of the device's memory that the case is about, None where it is about all
    of it or no case is named.
    """

    case: OomCause
    text: str
    evidence: tuple[OomEvidence, ...] = ()
    next: tuple[OomRecommendation, ...] = ()
    share: float | None = None


def judge(
    record: OomRecord,
    setup: RunSetup | None = None,
    *,
    growth: Mapping[str, Any] | None = None,
    allowed: Allowed | None = None,
) -> OomVerdict:
    """Name the case of a failed allocation, or abstain.

    `setup` is what the run was started with: for a run of ours the next steps are settings.
    `growth` is the data of the run's last `memory_growth` event. `allowed(field, value)` says
    whether a setting is possible on this machine.
    """
    remark = None
    if record.memory is not MemoryKind.GPU:
        case, text, share, advice = host_case(record)
        evidence = host_evidence(record)
    else:
        figures = figures_of(record)
        found = trend(record, growth)
        case, text, share, advice = gpu_case(record, figures, found)
        evidence = gpu_evidence(record, figures, found)
        remark = pieces_remark(record, figures, case)
    take = steps_to_take(advice, record, setup, allowed, has_pieces=remark is not None)
    return OomVerdict(
        case=case,
        text=text if remark is None else f"{text} {remark}",
        evidence=evidence,
        next=take,
        share=None if share is None else round(min(1.0, max(0.0, share)), 4),
    )
