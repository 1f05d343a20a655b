"""Detect that a run makes no step while one is due. Pure; no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

WARM_STEPS = 5  # Number of first steps that compile and allocate.
USUAL_STEPS = 10.0  # Minimum duration of a stall, in usual step times.
PATIENCE = 1.5  # As a multiple of the longest gap so far, such as for a checkpoint.
MIN_LEARNED_S = 5.0  # Minimum duration of a gap that counts as the longest.
UPDATES = 30  # Number of updates with a step, of which the median is the usual step time.


@dataclass(frozen=True, slots=True)
class StepGap:
    """Time in seconds without a step or other work, while a step is due.

    `usual_s` is the usual step time, `longest_s` the longest gap that ended by itself.
    """

    seconds: float
    usual_s: float
    longest_s: float

    def is_stall(self, min_s: float) -> bool:
        """Return True if the gap is at least `min_s` and much longer than usual."""
        return self.seconds >= max(min_s, USUAL_STEPS * self.usual_s, PATIENCE * self.longest_s)


class StallDetector:
    """Measures the time without a step; times in seconds of one clock.

    One thread calls `update` about once a second. `add_collective` is thread-safe.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # Time of the last step or other work.
        self._step = 0
        self._work = 0
        self._steps_seen = 0
        self._longest_s = 0.0
        self._step_times: deque[float] = deque(maxlen=UPDATES)
        self._collectives: deque[bool] = deque()

    def add_collective(self, *, ends_gap: bool) -> None:
        """Count a new collective as work at the next update.

        `ends_gap`: the rank has waited for it. Otherwise earlier collectives may have been missed,
        and a long validation must not count as one long gap.
        """
        self._collectives.append(ends_gap)

    def update(self, now: float, step: int, *, due: bool, work: int) -> StepGap | None:
        """Return the gap since the last step; None unless a step is due and the first are over.

        `due`: the run trains and serves no command. `work` increases with work other than steps.
        """
        collectives = [self._collectives.popleft() for _ in range(len(self._collectives))]
        if self._since is None or not due:
            self._restart(now, step, work)
            return None
        gap_s = now - self._since
        steps = step - self._step
        if steps > 0:
            self._step_times.append(gap_s / steps)
            self._steps_seen += steps
        if steps != 0 or work != self._work or collectives:
            is_learned = steps != 0 or work != self._work or any(collectives)
            is_warm = self._steps_seen > WARM_STEPS + steps
            if is_learned and is_warm and gap_s >= MIN_LEARNED_S:
                self._longest_s = max(self._longest_s, gap_s)
            gap_s = 0.0
            self._restart(now, step, work)
        if self._steps_seen < WARM_STEPS:
            return None
        return StepGap(gap_s, median(self._step_times), self._longest_s)

    def _restart(self, now: float, step: int, work: int) -> None:
        self._since = now
        self._step = step
        self._work = work
