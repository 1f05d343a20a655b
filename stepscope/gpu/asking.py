"""The error policy: what follows when the driver does not answer one question about one GPU.

A question that was refused is not repeated, an error is asked again less and less often, and a GPU
that is lost is left alone. `judge` decides by NVML's return code; `Asking` remembers.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from enum import Enum, auto

import pynvml

log = logging.getLogger(__name__)

NOT_BY_GPU, NOT_BY_DRIVER = "not supported on this GPU", "not offered by this driver"
NO_DATA, PERMISSION = "no data", "permission"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
SLOW_S = 0.02
"""A call that takes longer delays whoever else asks the driver."""
SLOW_CALLS = 3
SELDOM_S = 1.0
"""How often such a call is made."""
CHEAP_S, SHARE = 1e-4, 1e-3
"""A call that takes longer than the first is made so seldom that it takes this share of a core.

On an H100 (driver 580) most calls take 20 to 60 us, the energy counter 2.6 ms, the processes'
utilization 1.5 ms, the margin to the temperature limit 0.8 ms (docs/gpu)."""
LONGEST_REST_S = 5.0
MEASURED_CALLS = 3
"""The least of so many calls is what it takes: the first one may wake the driver."""


class Step(Enum):
    """What to do next."""

    ALTERNATIVE = auto()
    OFF = auto()
    AGAIN = auto()
    NEXT_TIME = auto()
    PAUSE = auto()
    LOST = auto()
    REOPEN = auto()


def judge(code: int, answered: bool) -> tuple[Step, str]:
    """Return what follows from NVML's return code, with the reason to show.

    `answered`: the same question was answered before, so that an argument cannot be wrong but the
    handle can.
    """
    match code:
        case pynvml.NVML_ERROR_NOT_SUPPORTED:
            return Step.ALTERNATIVE, NOT_BY_GPU
        case (
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
            | pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
            | pynvml.NVML_ERROR_DEPRECATED
        ):
            return Step.ALTERNATIVE, NOT_BY_DRIVER
        case pynvml.NVML_ERROR_INVALID_ARGUMENT if not answered:  # unknown to the driver
            return Step.ALTERNATIVE, NOT_BY_GPU
        case pynvml.NVML_ERROR_NO_PERMISSION:
            return Step.OFF, PERMISSION
        case (
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED
            | pynvml.NVML_ERROR_GPU_IS_LOST
            | pynvml.NVML_ERROR_RESET_REQUIRED
            | pynvml.NVML_ERROR_GPU_NOT_FOUND
            | pynvml.NVML_ERROR_INVALID_ARGUMENT  # what was valid before: the handle is not now
        ):
            return Step.LOST, "lost"
        case pynvml.NVML_ERROR_UNINITIALIZED:  # shut down by other code
            return Step.REOPEN, ""
        case pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
            return Step.AGAIN, NO_DATA
        case (
            pynvml.NVML_SUCCESS
            | pynvml.NVML_ERROR_NOT_FOUND
            | pynvml.NVML_ERROR_TIMEOUT
            | pynvml.NVML_ERROR_NO_DATA
        ):
            return Step.NEXT_TIME, NO_DATA
    return Step.PAUSE, "error"


@dataclass(slots=True)
class Asking:
    """One question about one GPU: which of its `readers` is asked, when again, and why it fails."""

    what: str
    readers: int
    reader: int = 0
    off: bool = False
    answered: bool = False
    retry_at: float = -math.inf
    pause_s: float = FIRST_PAUSE_S
    reason: str | None = None
    slow_calls: int = 0
    calls: int = 0
    cost_s: float = math.inf
    """What a call takes: the least of the first ones."""

    def answer(self) -> None:
        """Note an answer: what went wrong before is over."""
        self.answered, self.reason, self.pause_s = True, None, FIRST_PAUSE_S

    @property
    def measured(self) -> bool:
        """Whether it is known what a call takes."""
        return self.calls >= MEASURED_CALLS

    def measure(self, seconds: float) -> None:
        """Note what one of the first calls took."""
        if not self.measured:
            self.calls += 1
            self.cost_s = min(self.cost_s, seconds)

    def rest(self, now: float) -> None:
        """Do not ask again before its share of a core allows it, once that is known."""
        if self.measured and self.cost_s > CHEAP_S:
            self.retry_at = now + min(self.cost_s / SHARE, LONGEST_REST_S)

    def took(self, now: float, seconds: float) -> None:
        """Ask seldom what has taken long a few times."""
        self.slow_calls = self.slow_calls + 1 if seconds > SLOW_S else 0
        if self.slow_calls >= SLOW_CALLS:
            if self.slow_calls == SLOW_CALLS:
                log.warning(
                    "%s: %.0f ms a call; asked once a second at most", self.what, 1e3 * seconds
                )
            self.retry_at = max(self.retry_at, now + SELDOM_S)

    def unsupported(self, reason: str) -> bool:
        """Go over to the next reader; False, and never asked again, where there is none."""
        if self.reader + 1 < self.readers:
            self.reader += 1
            return True
        self.turn_off(reason)
        return False

    def turn_off(self, reason: str) -> None:
        """Do not ask again; one line in the log."""
        log.info("%s: %s; not asked again", self.what, reason)
        self.off, self.reason = True, reason

    def back_off(self, now: float, reason: str) -> None:
        """Ask again after a pause, which doubles each time; one line in the log."""
        if self.pause_s == FIRST_PAUSE_S:
            log.warning("%s: %s; asking again less often", self.what, reason)
        self.reason = f"error: {reason}"
        self.retry_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
