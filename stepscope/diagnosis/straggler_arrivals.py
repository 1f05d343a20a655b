"""Who is slow where no DistributedDataParallel tells: by who entered the collectives last. Pure.

With gloo a rank that waits stands in the collective. From the last rank's entry on all go on
together; from then to a rank's own entry into the next collective it is busy by itself, and from
there to the last rank's entry it waits. The busy times fall into the phases of the step that the
host's clock knows. All ranks must be on one host, so that their clocks agree.

Without a DataLoader the time before forward counts as forward on that clock. The first collective
in it, such as FSDP2's all-gather of the root's parameters, separates the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.diagnosis.straggler_times import OWN, STEP_TIME, Phase, RankRows, RankTimes
from stepscope.store.frames import Floats

HOST_PHASES = {
    Phase.INPUT: "perf/data_wait",
    Phase.FORWARD: "perf/forward",
    Phase.BACKWARD: "perf/backward",
    Phase.OPTIMIZER: "perf/optimizer",
}


def times_by_arrival(ranks: Sequence[RankRows]) -> list[RankTimes]:
    """Return each rank's phases without waiting; no steps where no collective is common to all."""
    common = ranks[0].sequence
    for one in ranks[1:]:
        common = np.intersect1d(common, one.sequence)
    if len(common) < 2:
        return [_times(one, np.array([]), np.array([]), np.array([])) for one in ranks]
    rows = [np.searchsorted(one.sequence, common) for one in ranks]
    entered = np.array([one.created[row] for one, row in zip(ranks, rows, strict=True)])
    released = entered.max(axis=0)
    found = []
    for place, one in enumerate(ranks):
        # From each release to the rank's next entry it is busy; then it waits, until the next.
        edges = np.stack([released[:-1], np.maximum(entered[place, 1:], released[:-1])], axis=1)
        busy = edges[:, 1] - edges[:, 0]
        total = np.cumsum(busy)
        clock = np.append(edges.ravel(), released[-1])
        spent = np.append(np.stack([total - busy, total], axis=1).ravel(), total[-1])
        found.append(_times(one, np.maximum.accumulate(clock), spent, entered[place]))
    return found


def _times(rows: RankRows, clock: Floats, spent: Floats, entered: Floats) -> RankTimes:
    """Return the phases of the steps that lie within `clock`; `spent` is the busy time until it.

    `entered` is when this rank entered each collective.
    """
    has_loader = bool(np.isfinite(rows.columns.get("perf/data_wait", np.array([np.nan]))).any())
    length = rows.columns.get(STEP_TIME, np.full(len(rows.steps), np.nan))
    timed = np.flatnonzero(length > 0)
    steps, ends, length = rows.steps[timed], rows.ts[timed], length[timed]
    if not len(clock):
        clock, spent = np.array([np.inf, np.inf]), np.zeros(2)
    own = np.full((len(OWN), len(timed)), np.nan)
    upper = ends
    # Backwards from the end of the step, as its phases follow each other.
    for phase in (Phase.OPTIMIZER, Phase.BACKWARD, Phase.FORWARD, Phase.INPUT):
        took = np.nan_to_num(rows.columns.get(HOST_PHASES[phase], np.zeros(len(rows.steps)))[timed])
        lower = upper - took
        if phase is Phase.FORWARD and not has_loader and len(entered):
            first = entered[np.minimum(np.searchsorted(entered, lower), len(entered) - 1)]
            lower = np.where((lower <= first) & (first < upper), first, lower)
        if phase is Phase.INPUT and not has_loader:
            lower = np.minimum(ends - length, upper)
        own[OWN.index(phase)] = _busy(clock, spent, lower, upper)
        upper = lower
    own[OWN.index(Phase.OTHER)] = _busy(clock, spent, np.minimum(ends - length, upper), upper)
    whole = (ends - length >= clock[0]) & (ends <= clock[-1])
    wait = length - own.sum(axis=0)
    # The optimizer's step is over when the ranks meet next: it delays the step after.
    before = np.append(False, np.diff(steps) == 1)
    place = OWN.index(Phase.OPTIMIZER)
    own[place] = np.where(before, np.roll(own[place], 1), np.nan)
    return RankTimes(
        rank=rows.rank,
        steps=steps[whole],
        ts=ends[whole],
        step_time=length[whole],
        wait=wait[whole],
        own=own[:, whole],
        timed=len(timed),
        has_loader=has_loader,
    )


def _busy(clock: Floats, spent: Floats, begin: Floats, end: Floats) -> Floats:
    """Return how much of each interval the rank was busy by itself, in seconds."""
    return np.asarray(np.interp(end, clock, spent) - np.interp(begin, clock, spent))
