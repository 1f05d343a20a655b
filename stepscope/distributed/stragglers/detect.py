"""Which rank of a job the others wait for, and in which phase of the step. Pure.

All ranks of a data-parallel job meet once a step, where gradients are averaged. The rank that
arrives last waits least. How a verdict is made:

1. Steps are aligned by DDP's iteration; those count of which every rank's waiting is known.
2. How late a rank is in a step: the median wait of the others less its own. Its lateness is the
   mean over the steps without the lowest and highest twentieth, less what is usual among the
   others: on a busy machine each rank is late now and then.
3. A rank is named where its lateness is NAMED of the step or more, and where permuting the ranks
   within blocks of steps would give such a lateness in fewer than P_LIMIT of all cases. Blocks,
   because neighboring steps are alike: a rank may lose its core for a while.
4. Its phase is the one in which it takes longer than the others do. All phases together explain
   EXPLAINED of its lateness, else nothing is said. A phase that explains less than half of it is
   named together with the next ones.

Without such a rank: different ranks that are late in turn (UNEVEN), or all ranks waiting alike
(COMMUNICATION). What is missing makes the verdict abstain, with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.bottleneck.classify import percent
from stepscope.distributed.stragglers.messages import (
    UNEVEN_NEXT,
    next_step,
    several,
    text_of,
    waits,
    where,
)
from stepscope.distributed.stragglers.step_phases import (
    BLOCKS,
    EXPLAINED,
    OWN,
    RankStepPhases,
    StepPhase,
    chance,
    explained,
    late_steps,
    lateness,
    others,
    trimmed,
)
from stepscope.store.blocks import Floats

RankIndices = NDArray[np.intp]

MIN_STEPS = 20
"""Steps in common below which nothing is said."""
LEAST_S = 1.0
"""Time that the steps must span: a rank may lose its core for some tenths of a second."""
NAMED = 0.05
"""Share of the step from which a rank is named. Worth a look is 10 % of a step, worth stopping for
is 20 % (TraceML's limits). A delay of 10 % of what a step should take was measured as 6 to 8 % of
what it took on a crowded machine, where all else takes longer too."""
CRITICAL = 0.2
"""Share of the step from which a verdict is critical."""
P_LIMIT = 0.01
UNEVEN_FROM = 0.2
"""Share of the step that is lost to different ranks, or to averaging, before it is said."""
BUSY_HOST = 0.9
"""Use of all cores from which ranks are late because they wait for a core."""


class StragglerKind(StrEnum):
    """What was found. The last names nothing, and says why."""

    STRAGGLER = "straggler"
    UNEVEN = "uneven"
    COMMUNICATION = "communication"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLateness:
    """One rank beside the others: seconds a step.

    `late` is its lateness (0 and more), `wait` its median wait; `excess` is by how much longer than
    the others it takes, by phase, where that is known. `last` is the share of steps in which it
    arrived last.
    """

    rank: int
    late: float
    wait: float
    last: float
    excess: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerVerdict:
    """What the steps of all ranks say.

    `ranks` are the named ones, the latest first; empty where nobody is to blame. `phase` is None
    where none is named, and OTHER for the time between two steps. `share` is the part of the step
    that is lost, 0 to 1. `text` is a sentence in any case, for NONE the reason.
    """

    kind: StragglerKind
    text: str
    ranks: tuple[int, ...] = ()
    phase: StepPhase | None = None
    share: float | None = None
    next: str | None = None
    steps: int = 0
    step_time: float | None = None
    p: float | None = None
    standings: tuple[RankLateness, ...] = ()

    @property
    def is_critical(self) -> bool:
        """Say whether a fifth of the step or more is lost."""
        return self.share is not None and self.share >= CRITICAL


def judge(
    ranks: Sequence[RankStepPhases], *, world_size: int | None = None, busy_host: bool = False
) -> StragglerVerdict:
    """Judge the newest steps of all ranks of a job.

    `world_size` is the number of ranks that there are, more than are given where the others are
    recorded elsewhere. `busy_host`: the cores of the host are all in use.
    """
    missing = _missing(ranks)
    if missing is not None:
        return StragglerVerdict(kind=StragglerKind.NONE, text=missing)
    steps = _common(ranks)
    if len(steps) < MIN_STEPS:
        return _too_few(len(steps))
    table = _Table.of(sorted(ranks, key=lambda one: one.rank), steps)
    if table.span_s < LEAST_S:
        text = (
            f"The steps common to all ranks span {table.span_s:.1f} s; {LEAST_S:.0f} s is needed."
        )
        return StragglerVerdict(kind=StragglerKind.NONE, text=text, steps=len(steps))
    return _judged(table, max(world_size or 0, len(ranks)), busy_host)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The steps in common: `wait`, `late` and each phase of `own` are (ranks, steps).

    `step_time` is the mean step, as a lateness is a mean, and `usual_step` the median.
    """

    ranks: tuple[int, ...]
    wait: Floats
    late: Floats
    own: Floats
    step_time: float
    usual_step: float
    span_s: float
    per_step: int
    has_loader: bool

    @classmethod
    def of(cls, ranks: Sequence[RankStepPhases], steps: Floats) -> _Table:
        rows = [np.searchsorted(one.steps, steps) for one in ranks]
        wait = np.array([one.wait[row] for one, row in zip(ranks, rows, strict=True)])
        own = np.array([one.own[:, row] for one, row in zip(ranks, rows, strict=True)])
        times = np.array([one.step_time[row] for one, row in zip(ranks, rows, strict=True)])
        ts = ranks[0].ts[rows[0]]
        return cls(
            ranks=tuple(one.rank for one in ranks),
            wait=wait,
            late=others(wait) - wait,
            own=own.transpose(1, 0, 2),
            step_time=trimmed(times.ravel()),
            usual_step=float(np.median(times)),
            span_s=float(ts[-1] - ts[0]),
            per_step=max(one.per_step for one in ranks),
            has_loader=all(one.has_loader for one in ranks),
        )


def _judged(table: _Table, world_size: int, busy_host: bool) -> StragglerVerdict:
    late = lateness(table.late)
    named = np.flatnonzero(late >= max(NAMED * table.step_time, late.max() / 2))
    standings = _standings(table, late)
    count, every = table.wait.shape[1], table.step_time
    facts: dict[str, Any] = {"steps": count, "step_time": every, "standings": standings}
    if 0 < len(named) <= len(table.ranks) / 2:
        p = chance(table.late)
        if p < P_LIMIT:
            return _named(table, named[np.argsort(-late[named])], late, facts | {"p": p})
    shared = None
    if not busy_host:
        shared = _most(table, facts) or _uneven(table, facts)
        shared = shared or _communication(table, world_size, facts)
    return shared or _nothing(table, facts, busy_host)


def _named(
    table: _Table, named: RankIndices, late: Floats, facts: dict[str, Any]
) -> StragglerVerdict:
    """Return the verdict on ranks that are late, with the phase that explains it."""
    first = int(named[0])
    excess = _excess(table, first, np.arange(table.wait.shape[1]))
    phases = explained(excess, trimmed(table.late[first]))
    ranks = tuple(table.ranks[place] for place in named)
    share = float(late[first]) / table.step_time
    other = [rank for rank in table.ranks if rank not in ranks]
    waiting = other[0] if len(other) == 1 else None
    if not phases:
        text = (
            f"{waits(waiting)} for rank {ranks[0]}, {percent(share)} of each step, but no "
            "recorded phase explains it."
        )
        return StragglerVerdict(kind=StragglerKind.NONE, text=text, **facts)
    return StragglerVerdict(
        kind=StragglerKind.STRAGGLER,
        text=text_of(
            ranks, phases, share, excess, facts, waiting=waiting, has_loader=table.has_loader
        ),
        ranks=ranks,
        phase=phases[0],
        share=share,
        next=next_step(phases[0], has_loader=table.has_loader),
        **facts,
    )


def _most(table: _Table, facts: dict[str, Any]) -> StragglerVerdict | None:
    """Return what is said where more than half of the ranks are always late; else None."""
    among = late_steps(table.wait)
    late, early = (
        [table.ranks[place] for place in np.flatnonzero(which)]
        for which in (among > EXPLAINED, among < 1 - EXPLAINED)
    )
    share = trimmed(table.wait.max(axis=0) - table.wait.min(axis=0)) / table.step_time
    if not early or len(late) <= len(early) or len(late + early) < len(among) or share < NAMED:
        return None
    text = (
        f"Most ranks are late in nearly every step ({several(late)}), by {percent(share)} of "
        f"the step. Either these are slow, or the others ({several(early)}) have less to do; "
        "the data cannot tell."
    )
    return StragglerVerdict(kind=StragglerKind.NONE, text=text, **facts)


def _uneven(table: _Table, facts: dict[str, Any]) -> StragglerVerdict | None:
    """Return the verdict on ranks that are late in turn; None where little is lost to them."""
    last = table.late.argmax(axis=0)
    lost = table.late.max(axis=0)
    share = float(np.median(lost)) / table.usual_step
    lows = [np.median(block) for block in np.array_split(lost, BLOCKS)]
    if share < UNEVEN_FROM or np.sum(np.array(lows) >= UNEVEN_FROM * table.usual_step) < BLOCKS - 2:
        return None
    excesses = [_excess_by_step(table, place)[:, last == place] for place in set(last.tolist())]
    together = np.concatenate(excesses, axis=1)
    excess = {
        phase.value: trimmed(values)
        for phase, values in zip(OWN, together, strict=True)
        if np.isfinite(values).all()
    }
    phases = explained(excess, trimmed(lost))
    among = late_steps(table.wait)
    if not phases or among.max() > EXPLAINED > among.min():  # always the same ones
        return None
    text = (
        "Different ranks are late in turn, mostly "
        f"{where(phases, has_loader=table.has_loader)}: {percent(share)} of each step is lost "
        "to that step's slowest rank. No single rank is at fault."
    )
    return StragglerVerdict(
        kind=StragglerKind.UNEVEN,
        text=text,
        phase=phases[0],
        share=share,
        next=UNEVEN_NEXT,
        **facts,
    )


def _communication(
    table: _Table, world_size: int, facts: dict[str, Any]
) -> StragglerVerdict | None:
    """Return the verdict where even the last to arrive waits long; None where it does not."""
    least = table.wait.min(axis=0)
    share = float(np.median(least)) / table.usual_step
    lows = [np.median(block) for block in np.array_split(least, BLOCKS)]
    if share < UNEVEN_FROM or np.sum(np.array(lows) >= UNEVEN_FROM * table.usual_step) < BLOCKS - 2:
        return None
    if world_size > len(table.ranks):
        text = (
            f"All {len(table.ranks)} recorded ranks wait alike, {percent(share)} of each step. "
            f"The job has {world_size} ranks: the others may be slow, or the network."
        )
        return StragglerVerdict(kind=StragglerKind.NONE, text=text, **facts)
    return StragglerVerdict(
        kind=StragglerKind.COMMUNICATION,
        text=f"After computing, averaging gradients takes {percent(share)} of each step, on all "
        "ranks alike: no rank is late.",
        phase=StepPhase.COMMUNICATION,
        share=share,
        next=next_step(StepPhase.COMMUNICATION),
        **facts,
    )


def _nothing(table: _Table, facts: dict[str, Any], busy_host: bool) -> StragglerVerdict:
    most = max(facts["standings"], key=lambda one: one.late)
    share = most.late / facts["step_time"]
    if share < NAMED:
        text = f"No straggler: the latest rank costs {percent(share)} of each step."
    else:
        text = (
            f"Rank {most.rank} seems late by {percent(share)} of each step, but chance or "
            "several late ranks would look the same."
        )
    if table.per_step > 1:
        text += (
            f" Gradients are averaged {table.per_step} times per step and only one of these was "
            "examined: a delay in the others may go unseen."
        )
    if busy_host:
        text += " All host cores are busy: a rank that gets none is late."
    return StragglerVerdict(kind=StragglerKind.NONE, text=text, **facts)


def _standings(table: _Table, late: Floats) -> tuple[RankLateness, ...]:
    last = np.bincount(table.late.argmax(axis=0), minlength=len(table.ranks)) / table.wait.shape[1]
    every = np.arange(table.wait.shape[1])
    return tuple(
        RankLateness(
            rank=rank,
            late=max(0.0, float(late[place])),
            wait=float(np.median(table.wait[place])),
            last=float(last[place]),
            excess=_excess(table, place, every),
        )
        for place, rank in enumerate(table.ranks)
    )


def _excess(table: _Table, place: int, columns: RankIndices) -> dict[str, float]:
    """Return by how much longer than the others a rank takes, by phase: seconds a step."""
    by_step = _excess_by_step(table, place)[:, columns]
    return {
        phase.value: trimmed(values)
        for phase, values in zip(OWN, by_step, strict=True)
        if np.isfinite(values).sum() >= MIN_STEPS
    }


def _excess_by_step(table: _Table, place: int) -> Floats:
    """Return a rank's phases (5, steps) less the median of the others'."""
    others = np.delete(table.own, place, axis=1)
    return np.asarray(table.own[:, place] - np.median(others, axis=1))


def _missing(ranks: Sequence[RankStepPhases]) -> str | None:
    """Return what is missing for any verdict."""
    if len(ranks) < 2:
        return "Only one process is recorded, so no rank waits for another."
    if not any(one.timed for one in ranks):
        return "No rank has recorded how long its steps take."
    silent = [one.rank for one in ranks if not len(one.steps)]
    models = max(one.models for one in ranks)
    if silent and models > 1:
        return (
            f"Waiting times are unknown: {models} DistributedDataParallel models are trained, "
            "which synchronize separately."
        )
    if len(silent) == len(ranks):
        if max(one.timed for one in ranks) < 3 * MIN_STEPS:
            return "The ranks have recorded too few steps to tell who waits for whom."
        return (
            "Who waits for whom is not known: no rank trains with torch's DistributedDataParallel, "
            "whose log tells waiting from computing."
        )
    if silent:
        which = ", ".join(map(str, sorted(silent)))
        whose = f"rank {which} is" if len(silent) == 1 else f"ranks {which} are"
        return f"The waiting time of {whose} unknown, so ranks cannot be compared."
    return None


def _common(ranks: Sequence[RankStepPhases]) -> Floats:
    steps = ranks[0].steps
    for one in ranks[1:]:
        steps = np.intersect1d(steps, one.steps, assume_unique=False)
    return steps


def _too_few(steps: int) -> StragglerVerdict:
    text = f"Not enough data: {steps} steps of all ranks can be compared, {MIN_STEPS} are needed."
    return StragglerVerdict(kind=StragglerKind.NONE, text=text, steps=steps)
