"""Find the straggler of a job, and the phase in which it is late.

All ranks of a data-parallel job synchronize once per step, in the gradient all-reduce. The rank
that arrives last waits least.

1. Steps of the last WINDOW_S are aligned by DDP's iteration; steps count if every rank's wait is
   known.
2. The lateness of a rank in a step is the median wait of the others less its own.
3. A rank is named if its median lateness is at least MIN_SHARE of the step, and it is late in at
   least OFTEN of the steps.
4. Its phase is that in which it takes longer than the others. If all phases together explain less
   than EXPLAINED of its lateness, no rank is named.

Without such a rank: different ranks are late in turn (UNEVEN), or all ranks wait alike
(COMMUNICATION). If data are missing, the finding is NONE with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.common.formatting import format_short_time
from stepscope.distributed import ranks_text
from stepscope.distributed.stragglers.step_phases import (
    MIN_STEPS,
    OWN,
    RankStepPhases,
    StepPhase,
)
from stepscope.run_setup import setup_of
from stepscope.store.blocks import Floats

BUSY_HOST = 0.9  # Minimum utilization of all cores at which a process waits for a core.
WINDOW_S = 30.0  # Maximum age of the compared steps, if these are at least 2 * MIN_STEPS.
MIN_SPAN_S = 1.0  # Minimum span of the steps: a rank may lose its core for some tenths of a second.
MIN_SHARE = 0.05
"""Minimum lateness of a straggler as a fraction of the step. A relevant delay is 10% (TraceML's
limit), which was measured as 6 to 8% of the steps of a busy host, where all else takes longer."""
OFTEN = 0.75  # Minimum fraction of the steps; by chance a rank is late in half of them.
EXPLAINED = 0.8  # Minimum fraction of the lateness that the phases explain.
UNEVEN_FROM = 0.2  # Minimum fraction of the step lost to different ranks, or to communication.


class StragglerKind(StrEnum):
    """Result of the analysis; NONE has a reason instead of a cause."""

    STRAGGLER = "straggler"
    UNEVEN = "uneven"
    COMMUNICATION = "communication"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StragglerFinding:
    """Result for the steps of all ranks; `ranks` are the stragglers, the latest first.

    `phase` is None if unknown, and OTHER between two steps. `share` is the lost fraction of the
    step. `text` is a sentence, for NONE the reason.
    """

    kind: StragglerKind
    text: str
    ranks: tuple[int, ...] = ()
    phase: StepPhase | None = None
    share: float | None = None
    next: str | None = None


PLACES = {
    StepPhase.INPUT: "before it calls its model",
    StepPhase.FORWARD: "in forward",
    StepPhase.BACKWARD: "in backward computation",
    StepPhase.OPTIMIZER: "in the optimizer's step",
    StepPhase.OTHER: "between the optimizer's step and the next batch",
}
RECOMMENDATIONS = {
    StepPhase.INPUT: "Check how this rank gets its batches: its data shard, its disk or network "
    "storage, other programs on its cores, and the number of DataLoader workers. Without a "
    "DataLoader this includes logging, saving and validation.",
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
UNEVEN_NEXT = (
    "Give all ranks the same amount of work each step: sort or bucket samples by length, pad to "
    "the same size, or balance the batches by tokens."
)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """The common steps: `wait` and `late` are (ranks, steps), `excess` is (ranks, 5, steps).

    `excess` is the additional time of a rank compared to the others by phase, NaN if unknown.
    """

    ranks: tuple[int, ...]
    wait: Floats
    late: Floats
    excess: Floats
    step_time: float

    @property
    def count(self) -> int:
        """The number of common steps."""
        return int(self.wait.shape[1])

    def share_of(self, seconds: Floats) -> float:
        """Return the usual fraction of a step; 0 if it is less than UNEVEN_FROM too often."""
        is_often = np.quantile(seconds, 1 - OFTEN) >= UNEVEN_FROM * self.step_time
        return float(np.median(seconds)) / self.step_time if is_often else 0.0


def in_job(run_json: Mapping[str, Any]) -> bool:
    """Return True if a process is a rank of a job of several ranks."""
    return (run_json.get("world_size") or 1) > 1


def straggler_among(
    times: Sequence[RankStepPhases], run_json: Mapping[str, Any], host_cpu: float | None
) -> StragglerFinding | None:
    """Return a job's finding; None for one process or simulated GPUs. `host_cpu` is 0 to 1."""
    if not in_job(run_json) or setup_of(run_json).simulated:
        return None
    is_busy = (host_cpu or 0.0) >= BUSY_HOST
    return find_straggler(times, world_size=run_json["world_size"], busy_host=is_busy)


def find_straggler(
    ranks: Sequence[RankStepPhases], *, world_size: int = 0, busy_host: bool = False
) -> StragglerFinding:
    """Return the finding on the newest steps of all ranks of a job.

    `world_size` includes ranks recorded elsewhere. `busy_host`: all cores of the host are in use.
    """
    missing = _missing(ranks)
    if missing is not None:
        return _none(missing)
    ranks = sorted(ranks, key=lambda one: one.rank)
    numbers = functools.reduce(np.intersect1d, [one.steps for one in ranks])
    ts = ranks[0].ts[np.searchsorted(ranks[0].steps, numbers)]
    recent = int(np.count_nonzero(ts > ts[-1:] - WINDOW_S))
    kept = slice(-max(2 * MIN_STEPS, recent), None)
    numbers, ts = numbers[kept], ts[kept]
    rows = [np.searchsorted(one.steps, numbers) for one in ranks]
    if len(numbers) < MIN_STEPS or ts[-1] - ts[0] < MIN_SPAN_S:
        needed = f"{MIN_STEPS} over at least {MIN_SPAN_S:.0f} s are needed"
        return _none(f"Not enough data: the ranks have {len(numbers)} steps in common, {needed}.")
    wait = np.array([one.wait[row] for one, row in zip(ranks, rows, strict=True)])
    own = np.array([one.own[:, row] for one, row in zip(ranks, rows, strict=True)])
    times = np.array([one.step_time[row] for one, row in zip(ranks, rows, strict=True)])
    steps = _Steps(
        ranks=tuple(one.rank for one in ranks),
        wait=wait,
        late=others(wait) - wait,
        excess=np.where(np.isnan(own).any(axis=0), np.nan, own - others(own)),
        step_time=float(np.median(times)),
    )
    late_s = np.median(steps.late, axis=1)
    is_often_late = (steps.late > 0).mean(axis=1) >= OFTEN
    min_s = max(MIN_SHARE * steps.step_time, late_s.max() / 2)
    named = np.flatnonzero(is_often_late & (late_s >= min_s))
    if 0 < len(named) <= len(ranks) / 2:
        return _straggler(steps, named[np.argsort(-late_s[named])].tolist(), late_s)
    shared = None
    if not busy_host:
        shared = _uneven(steps, is_often_late) or _communication(steps, world_size)
    if shared is not None:
        return shared
    share = max(0.0, float(late_s.max())) / steps.step_time
    busy = " All host cores are busy: a rank that gets none is late." if busy_host else ""
    return _none(f"No straggler: the latest rank costs {share:.0%} of each step.{busy}")


def _none(text: str) -> StragglerFinding:
    return StragglerFinding(StragglerKind.NONE, text)


def _missing(ranks: Sequence[RankStepPhases]) -> str | None:
    """Return why no finding is possible, or None."""
    if len(ranks) < 2:
        return "Only one process is recorded, so no rank waits for another."
    if max(one.timed for one in ranks) < MIN_STEPS:
        return "Not enough data: the ranks have recorded too few steps."
    unknown = [one.rank for one in ranks if not len(one.steps)]
    if not unknown:
        return None
    return (
        f"The waiting time of {ranks_text(sorted(unknown))} is unknown: only the log of torch's "
        "DistributedDataParallel distinguishes waiting from computing, and only of one model."
    )


def others(values: Floats) -> Floats:
    """Return, for each rank, the median of the others' values (ranks, ...), rounded down."""
    ordered = np.sort(values, axis=0)
    middle = (len(values) - 2) // 2
    median = np.where(values <= ordered[middle], ordered[middle + 1], ordered[middle])
    return np.asarray(median)


def _straggler(steps: _Steps, named: Sequence[int], late_s: Floats) -> StragglerFinding:
    """Return the finding on late ranks, with the phases that explain their lateness."""
    ranks = tuple(steps.ranks[place] for place in named)
    share = float(late_s[named[0]]) / steps.step_time
    wait = f"The job waits for {ranks_text(sorted(ranks))}, {share:.0%} of each step"
    phases = _phases(steps.excess[named[0]], float(late_s[named[0]]))
    if not phases:
        return _none(f"{wait}, but no recorded phase explains it.")
    longer = " and ".join(
        f"{format_short_time(seconds)} longer {PLACES[phase]}" for phase, seconds in phases.items()
    )
    step = f"a step of {format_short_time(steps.step_time)} ({steps.count} steps)"
    phase = next(iter(phases))
    return StragglerFinding(
        kind=StragglerKind.STRAGGLER,
        text=f"{wait}: rank {ranks[0]} takes {longer} than the others, of {step}.",
        ranks=ranks,
        phase=phase,
        share=share,
        next=RECOMMENDATIONS[phase],
    )


def _phases(excess: Floats, late_s: float) -> dict[StepPhase, float]:
    """Return the phases to name for a lateness with their additional time, the longest first.

    Returns {} if all phases (5, steps) explain less than EXPLAINED of it. The named ones are at
    least half as long as the first.
    """
    typical: dict[StepPhase, float] = {}
    for name, values in zip(OWN, excess, strict=True):
        known = values[np.isfinite(values)]
        if len(known) >= MIN_STEPS:
            typical[name] = float(np.median(known))
    longer = sorted(
        (name for name in typical if typical[name] > 0), key=lambda name: -typical[name]
    )
    if sum(typical[name] for name in longer) < EXPLAINED * late_s:
        return {}
    return {name: typical[name] for name in longer if typical[name] >= typical[longer[0]] / 2}


def _uneven(steps: _Steps, is_often_late: NDArray[np.bool_]) -> StragglerFinding | None:
    """Return the finding on ranks that are late in turn; None if little time is lost."""
    last = steps.late.argmax(axis=0)
    lost_s = steps.late.max(axis=0)
    share = steps.share_of(lost_s)
    phases = _phases(steps.excess[last, :, np.arange(steps.count)].T, float(np.median(lost_s)))
    if not share or not phases or is_often_late.any():
        return None
    places = " and ".join(PLACES[phase] for phase in phases)
    text = (
        f"Different ranks are late in turn, mostly {places}: {share:.0%} of each step is lost to "
        "that step's slowest rank. No single rank is at fault."
    )
    phase = next(iter(phases))
    return StragglerFinding(StragglerKind.UNEVEN, text, (), phase, share, UNEVEN_NEXT)


def _communication(steps: _Steps, world_size: int) -> StragglerFinding | None:
    """Return the finding if even the last rank to arrive waits long; else None."""
    share = steps.share_of(steps.wait.min(axis=0))
    if not share or world_size > len(steps.ranks):  # Ranks recorded elsewhere may be late.
        return None
    text = (
        f"After computing, the gradient all-reduce takes {share:.0%} of each step, on all ranks "
        "alike: no rank is late."
    )
    phase = StepPhase.COMMUNICATION
    return StragglerFinding(
        StragglerKind.COMMUNICATION, text, (), phase, share, RECOMMENDATIONS[phase]
    )
