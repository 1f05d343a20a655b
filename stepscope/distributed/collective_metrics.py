"""Bytes of this rank's collectives, from torch's Flight Recorder.

The training thread reads at a step boundary, where it captures no graph and steps are whole. A
reading takes 1 to 20 ms and holds the GIL, so its period is 1 to 64 s: 0.2% of a core. The period
is a power of two and counted in epoch seconds (`common/clock.py`), so ranks whose clocks agree read
in the same step and do not delay each other one after another.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from stepscope.common.clock import clock
from stepscope.distributed import rank_and_size
from stepscope.distributed.flight_recorder import FlightRecorderDump, dumps, parsed

log = logging.getLogger(__name__)

REST = 500  # Time until the next reading as a multiple of this one's CPU time: 0.2% of a core.
MIN_PERIOD_S = 1.0
MAX_PERIOD_S = 64.0
EARLY_S = 0.05  # Half a tick of the sampler: the ranks' ticks differ by some milliseconds.
KEYS = ("comm/bytes", "comm/rate")
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

NO_RECORDER = "this torch has no Flight Recorder"
SWITCHED_OFF = "the Flight Recorder is switched off: set TORCH_FR_BUFFER_SIZE to 2000"
NOTHING_YET = "no collective of a whole step has been recorded yet"


@dataclass(slots=True)
class _Sums:
    """New collectives since the last reading; `passed` includes those overwritten unread."""

    seen: int = 0
    passed: int = 0
    input_bytes: int = 0

    def add(self, record: FlightRecorderDump, counted: int) -> int:
        """Add the records after `counted`; return the number of the newest."""
        new = record.collectives
        newest = max((one.record for one in new), default=counted)
        self.passed += newest - counted
        self.seen += len(new)
        # A point-to-point operation counts on its sender: the receiver has the same bytes again.
        sent = (one for one in new if not one.operation.startswith("recv"))
        self.input_bytes += sum(one.input_bytes for one in sent)
        return newest

    def values(self, seconds: float, steps: int) -> dict[str, float]:
        """Return the metrics over these seconds and steps."""
        # Overwritten collectives count as large as the others.
        mean_bytes = self.input_bytes / self.seen if self.seen else 0.0
        return {
            "comm/bytes": mean_bytes * self.passed / steps,
            "comm/rate": mean_bytes * self.passed / seconds,
        }


class CollectiveMetrics:
    """Metrics of the collectives of one run; a job of one process has no readings.

    Only the training thread calls `read`; all else is thread-safe. `step` returns the last step.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = clock.now,
    ) -> None:
        self.step: Callable[[], int] = lambda: 0
        self._clock = clock
        self._wall = wall
        self._due = -math.inf
        self._counted: dict[str, int] = {}  # The newest counted record by recorder.
        self._before: tuple[float, int] | None = None  # Time and step of the last reading.
        self._values: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._failed = False

    def is_due(self) -> bool:
        """Return True if it is time for a reading."""
        if self._failed or self._wall() < self._due - EARLY_S:
            return False
        group = rank_and_size()
        return group is not None and group[1] > 1

    def reasons(self) -> dict[str, str]:
        """Return why metrics are missing, by key."""
        return dict(self._reasons)

    def take(self) -> dict[str, float]:
        """Return the values of the latest reading, once."""
        values, self._values = self._values, {}
        return values

    def read(self) -> float:
        """Read if due; return the seconds that took, 0.0 if not due. Never raises."""
        began = self._clock()
        spent_s = time.thread_time()
        is_first = self._before is None
        try:
            step = self.step()
            is_paused = self._before is not None and step <= self._before[1]
            if is_paused or not self.is_due() or _captures():
                return 0.0
            self._read(began, step)
        except Exception as error:  # of torch's private functions, in whatever version
            self._failed = True
            self._reasons = dict.fromkeys(KEYS, f"{type(error).__name__}: {error}")
            log.warning("stepscope: collectives are no longer read", exc_info=True)
        # The first reading loads the code.
        wanted_s = 0.0 if is_first else REST * (time.thread_time() - spent_s)
        limited_s = min(MAX_PERIOD_S, max(MIN_PERIOD_S, wanted_s))
        period_s = 2.0 ** math.ceil(math.log2(limited_s))
        self._due = (self._wall() + EARLY_S) // period_s * period_s + period_s
        return self._clock() - began

    def _read(self, now: float, step: int) -> None:
        before = self._before
        self._before = now, step
        sums = _Sums()
        contents = dumps()
        for name, content in contents.items():
            counted = self._counted.get(name, -1)
            self._counted[name] = sums.add(parsed(content, after=counted), counted)
        if before is None or all(counted < 0 for counted in self._counted.values()):
            reason = NOTHING_YET
            if not contents:
                reason = NO_RECORDER
            elif "0" in map(os.environ.get, SIZE_VARIABLES):
                reason = SWITCHED_OFF
            self._reasons = dict.fromkeys(KEYS, reason)
            return
        self._values = sums.values(now - before[0], step - before[1])
        self._reasons = {}


def _captures() -> bool:
    """Return True if this thread captures a CUDA graph."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing()
