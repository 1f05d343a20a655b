"""Find the straggler of a job, and the phase in which it is late. Pure; no I/O.

All ranks of a data-parallel job synchronize once per step, in the gradient all-reduce. The rank
that arrives last waits least.

1. Steps are aligned by DDP's iteration; steps count if every rank's wait is known.
2. The lateness of a rank in a step is the median wait of the others less its own. Its mean lateness
   is the trimmed mean over the steps, less the median of the others'.
3. A rank is named if its lateness is at least NAMED of the step, and the permutation test of ranks
   within blocks of steps has a p-value below P_LIMIT.
4. Its phase is that in which it takes longer than the others. If all phases together explain
   less than EXPLAINED of its lateness, no rank is named.

Without such a rank: different ranks are late in turn (UNEVEN), or all ranks wait alike
(COMMUNICATION). If data are missing, the verdict is NONE with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from stepscope.common.formatting import format_short_time
from stepscope.distributed import ranks_text
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

MIN_STEPS = 20  # Minimum number of common steps.
LEAST_S = 1.0  # Minimum span of the steps: a rank may lose its core for some tenths of a second.
NAMED = 0.05
"""Minimum lateness of a straggler as a fraction of the step. A relevant delay is 10% (TraceML's
limit), which was measured as 6 to 8% of the steps of a busy host, where all else takes longer."""
P_LIMIT = 0.01
UNEVEN_FROM = 0.2  # Minimum fraction of the step lost to different ranks, or to communication.


class StragglerKind(StrEnum):
    """Result of the analysis; NONE has a reason instead of a cause."""

    STRAGGLER = "straggler"
    UNEVEN = "uneven"
    COMMUNICATION = "communication"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StragglerVerdict:
    """Verdict on the steps of all ranks; `ranks` are the stragglers, the latest first.

    `phase` is None if unknown, and OTHER between two steps. `share` is the lost fraction of the
    step. `text` is a sentence, for NONE the reason.
    """

    kind: StragglerKind
    text: str
    ranks: tuple[int, ...] = ()
    phase: StepPhase | None = None
    share: float | None = None
    next: str | None = None
    steps: int = 0


def judge(
    ranks: Sequence[RankStepPhases], *, world_size: int | None = None, busy_host: bool = False
) -> StragglerVerdict:
    """Return the verdict on the newest steps of all ranks of a job.

    `world_size` includes ranks recorded elsewhere. `busy_host`: all cores of the host are in use.
    """
    if (missing := _missing(ranks)) is not None:
        return _nothing(missing)
    steps = functools.reduce(np.intersect1d, [one.steps for one in ranks])
    count = len(steps)
    if count < MIN_STEPS:
        text = f"{count} steps of all ranks can be compared, {MIN_STEPS} are needed."
        return _nothing(f"Not enough data: {text}", count)
    table = _Table.of(sorted(ranks, key=lambda one: one.rank), steps)
    if table.span_s < LEAST_S:
        span = f"{table.span_s:.1f} s; {LEAST_S:.0f} s is needed."
        return _nothing(f"The steps common to all ranks span {span}", count)
    late = lateness(table.late)
    named = np.flatnonzero(late >= max(NAMED * table.step_time, late.max() / 2))
    if 0 < len(named) <= len(ranks) / 2 and chance(table.late) < P_LIMIT:
        return _named(table, named[np.argsort(-late[named])], late)
    if not busy_host:
        size = max(world_size or 0, len(ranks))
        shared = _most(table) or _uneven(table) or _communication(table, size)
        if shared is not None:
            return shared
    return _no_straggler(table, late, busy_host)


def _nothing(text: str, steps: int = 0) -> StragglerVerdict:
    return StragglerVerdict(StragglerKind.NONE, text, steps=steps)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The common steps: `wait` and `late` are (ranks, steps), `excess` is (ranks, 5, steps).

    `excess` is the additional time of a rank compared to the others by phase, NaN if unknown.
    `step_time` is the mean step, as a lateness is a mean, and `usual_step` the median.
    """

    ranks: tuple[int, ...]
    wait: Floats
    late: Floats
    excess: Floats
    step_time: float
    usual_step: float
    span_s: float
    per_step: int
    has_loader: bool

    @property
    def steps(self) -> int:
        """The number of common steps."""
        return int(self.wait.shape[1])

    def mostly(self, lost: Floats) -> float | None:
        """Return the fraction of a step that is lost (n,), if UNEVEN_FROM in nearly all blocks."""
        lows = np.array([np.median(block) for block in np.array_split(lost, BLOCKS)])
        share = float(np.median(lost)) / self.usual_step
        is_lost = np.sum(lows >= UNEVEN_FROM * self.usual_step) >= BLOCKS - 2
        return share if share >= UNEVEN_FROM and is_lost else None

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
            excess=np.where(np.isnan(own).any(axis=0), np.nan, own - others(own)),
            step_time=trimmed(times.ravel()),
            usual_step=float(np.median(times)),
            span_s=float(ts[-1] - ts[0]),
            per_step=max(one.per_step for one in ranks),
            has_loader=all(one.has_loader for one in ranks),
        )


def _named(table: _Table, named: RankIndices, late: Floats) -> StragglerVerdict:
    """Return the verdict on late ranks, with the phase that explains their lateness."""
    first = int(named[0])
    excess = {
        phase.value: trimmed(values)
        for phase, values in zip(OWN, table.excess[first], strict=True)
        if np.isfinite(values).sum() >= MIN_STEPS
    }
    phases = explained(excess, trimmed(table.late[first]))
    ranks = tuple(table.ranks[place] for place in named)
    share = float(late[first]) / table.step_time
    other = [rank for rank in table.ranks if rank not in ranks]
    waiting = other[0] if len(other) == 1 else None
    if not phases:
        text = f"{waits(waiting)} for rank {ranks[0]}, {share:.0%} of each step, but no "
        return _nothing(f"{text}recorded phase explains it.", table.steps)
    text = text_of(ranks, phases, share, excess, waiting=waiting, has_loader=table.has_loader)
    text += f", of a step of {format_short_time(table.step_time)} ({table.steps} steps)."
    next_text = next_step(phases[0], has_loader=table.has_loader)
    return StragglerVerdict(
        StragglerKind.STRAGGLER, text, ranks, phases[0], share, next_text, table.steps
    )


def _most(table: _Table) -> StragglerVerdict | None:
    """Return the verdict if more than half of the ranks are always late; else None."""
    among = late_steps(table.wait)
    late, early = (
        [table.ranks[place] for place in np.flatnonzero(which)]
        for which in (among > EXPLAINED, among < 1 - EXPLAINED)
    )
    share = trimmed(table.wait.max(axis=0) - table.wait.min(axis=0)) / table.step_time
    if not early or len(late) <= len(early) or len(late + early) < len(among) or share < NAMED:
        return None
    return _nothing(
        f"Most ranks are late in nearly every step ({ranks_text(late)}), by {share:.0%} of "
        f"the step. Either these are slow, or the others ({ranks_text(early)}) have less to do; "
        "the data cannot distinguish these cases.",
        table.steps,
    )


def _uneven(table: _Table) -> StragglerVerdict | None:
    """Return the verdict on ranks that are late in turn; None if little time is lost."""
    last, lost = table.late.argmax(axis=0), table.late.max(axis=0)
    share = table.mostly(lost)
    if share is None:
        return None
    of_last = table.excess[last, :, np.arange(table.steps)]
    excess = {
        phase.value: trimmed(values)
        for phase, values in zip(OWN, of_last.T, strict=True)
        if np.isfinite(values).all()
    }
    phases = explained(excess, trimmed(lost))
    among = late_steps(table.wait)
    if not phases or among.max() > EXPLAINED > among.min():  # always the same ranks
        return None
    text = (
        "Different ranks are late in turn, mostly "
        f"{where(phases, has_loader=table.has_loader)}: {share:.0%} of each step is lost "
        "to that step's slowest rank. No single rank is at fault."
    )
    return StragglerVerdict(
        StragglerKind.UNEVEN, text, (), phases[0], share, UNEVEN_NEXT, table.steps
    )


def _communication(table: _Table, world_size: int) -> StragglerVerdict | None:
    """Return the verdict if even the last rank to arrive waits long; else None."""
    share = table.mostly(table.wait.min(axis=0))
    if share is None:
        return None
    if world_size > len(table.ranks):
        return _nothing(
            f"All {len(table.ranks)} recorded ranks wait alike, {share:.0%} of each step. "
            f"The job has {world_size} ranks: the others may be slow, or the network.",
            table.steps,
        )
    text = (
        f"After computing, the gradient all-reduce takes {share:.0%} of each step, on all "
        "ranks alike: no rank is late."
    )
    phase = StepPhase.COMMUNICATION
    return StragglerVerdict(
        StragglerKind.COMMUNICATION, text, (), phase, share, next_step(phase), table.steps
    )


def _no_straggler(table: _Table, late: Floats, busy_host: bool) -> StragglerVerdict:
    most = int(late.argmax())
    share = max(0.0, float(late[most])) / table.step_time
    if share < NAMED:
        text = f"No straggler: the latest rank costs {share:.0%} of each step."
    else:
        text = (
            f"Rank {table.ranks[most]} seems late by {share:.0%} of each step, but chance or "
            "several late ranks would look the same."
        )
    if table.per_step > 1:
        text += (
            f" Gradients are reduced {table.per_step} times per step, of which one was examined: a "
            "delay in the others may be missed."
        )
    if busy_host:
        text += " All host cores are busy: a rank that gets none is late."
    return _nothing(text, table.steps)


def _missing(ranks: Sequence[RankStepPhases]) -> str | None:
    """Return why no verdict is possible, or None."""
    if len(ranks) < 2:
        return "Only one process is recorded, so no rank waits for another."
    if not any(one.timed for one in ranks):
        return "No rank has recorded how long its steps take."
    silent = [one.rank for one in ranks if not len(one.steps)]
    models = max(one.models for one in ranks)
    if silent and models > 1:
        text = f"Waiting times are unknown: {models} DistributedDataParallel models are trained"
        return f"{text}, which synchronize separately."
    if len(silent) == len(ranks) and max(one.timed for one in ranks) < 3 * MIN_STEPS:
        return "Not enough data: the ranks have recorded too few steps."
    if len(silent) == len(ranks):
        return (
            "Waiting times are unknown: no rank trains with torch's DistributedDataParallel, whose "
            "log distinguishes waiting from computing."
        )
    if silent:
        whose = f"{ranks_text(sorted(silent))} {'is' if len(silent) == 1 else 'are'}"
        return f"The waiting time of {whose} unknown, so ranks cannot be compared."
    return None


_WHERE = {
    StepPhase.INPUT: "to get a batch",
    StepPhase.FORWARD: "in forward",
    StepPhase.BACKWARD: "in backward computation",
    StepPhase.OPTIMIZER: "in the optimizer's step",
    StepPhase.OTHER: "between the optimizer's step and the next batch",
}
_NEXT = {
    StepPhase.INPUT: "Check this rank's loading: its data shard, its disk or network storage, "
    "other programs on its cores; give its DataLoader more workers.",
    StepPhase.FORWARD: "Compare this rank's forward with another's: larger or longer samples, code "
    "that only this rank runs (prints, checks, metrics), lower clocks or another program on its "
    "GPU or cores. A profile of both ranks shows the difference.",
    StepPhase.BACKWARD: "Compare this rank's device with another's: clocks, temperature, other "
    "programs, sample sizes. Gradient hooks also run in backward.",
    StepPhase.OPTIMIZER: "Check what this rank does between backward() and the end of "
    "optimizer.step(): clipping, logging, reading values, or weights that only it updates.",
    StepPhase.OTHER: "Check what only this rank does between steps, such as logging, saving or "
    "validation; share it among ranks, or do it less often.",
    StepPhase.COMMUNICATION: "Reduce gradients less often (no_sync over several batches), send "
    "fewer bytes (a bf16 compression hook), try larger buckets, and check that the backend uses "
    "the fast link (NCCL_DEBUG=INFO names it).",
}
_WITHOUT_LOADER = "before it calls its model"
_NEXT_WITHOUT_LOADER = (
    "Check what only this rank does between optimizer.step() and the next model call: building "
    "its batch, logging, saving, validation. Without a DataLoader these cannot be separated."
)
UNEVEN_NEXT = (
    "Give all ranks the same amount of work each step: sort or bucket samples by length, pad to "
    "the same size, or balance the batches by tokens."
)


def where(phases: Sequence[StepPhase], *, has_loader: bool) -> str:
    """Return the text of the phases; without a DataLoader the input is all before the model."""
    return " and ".join(
        _WHERE[phase] if has_loader or phase is not StepPhase.INPUT else _WITHOUT_LOADER
        for phase in phases
    )


def next_step(phase: StepPhase, *, has_loader: bool = True) -> str:
    """Return the recommendation for a phase."""
    return _NEXT[phase] if has_loader or phase is not StepPhase.INPUT else _NEXT_WITHOUT_LOADER


def waits(waiting: int | None) -> str:
    """Return the begin of a sentence about the waiting rank; None for several ranks."""
    return "The others wait" if waiting is None else f"Rank {waiting} waits"


def text_of(
    ranks: Sequence[int],
    phases: Sequence[StepPhase],
    share: float,
    excess: Mapping[str, float],
    *,
    waiting: int | None = None,
    has_loader: bool = True,
) -> str:
    """Return the evidence as the begin of a sentence: the ranks, the time, the phases.

    `phases` explain the lateness, the longest first; `excess` is the additional time of each.
    `waiting` is the waiting rank, None for several.

    >>> text_of([2], [StepPhase.FORWARD], 0.1, {"forward": 0.002})
    'The others wait for rank 2, 10% of each step: it takes 2.00 ms longer in forward than they do'
    """
    longer = " and ".join(
        f"{format_short_time(excess[phase.value])} longer {where([phase], has_loader=has_loader)}"
        for phase in phases
    )
    who = f"rank {ranks[0]}" if len(ranks) > 1 else "it"
    they = "they do" if waiting is None else f"rank {waiting} does"
    late = f"{waits(waiting)} for {ranks_text(sorted(ranks))}, {share:.0%} of each step"
    return f"{late}: {who} takes {longer} than {they}"
