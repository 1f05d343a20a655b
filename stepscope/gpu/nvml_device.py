"""One GPU in NVML: its handle, and calls with their error policy.

The policy decides for each NVML error whether to retry, to give up one value, or to treat the GPU
as lost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

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


Clock = Callable[[], float]
T = TypeVar("T")

LOOK_AGAIN_S = 5.0
"""For a lost GPU."""
BINDING_ERRORS = (AttributeError, OSError, ValueError, LookupError)
"""What pynvml raises, beside its own errors, over a library that it does not fit."""


class Library:
    """The initialized NVML that the GPUs of one source share.

    `driver` is the driver's version, `major` its first number. `opened` counts how often NVML was
    initialized here: handles do not outlive a shutdown by other code.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.opened = 1
        self._open = True
        self.driver = static(pynvml.nvmlSystemGetDriverVersion)
        self.major = _major(self.driver)

    def reopen(self) -> None:
        """Initialize NVML if other code has shut it down. Raises NVMLError."""
        if not self._open:
            pynvml.nvmlInit()
            self._open = True

    def closed(self) -> None:
        """Note that NVML is shut down: all handles are void, and the next look opens it again."""
        if self._open:
            self._open = False
            self.opened += 1


class Gpu:
    """One GPU or MIG instance by its UUID. It holds no lock: one thread at a time may ask.

    `found` counts how often it was found: whoever knows the answers of before asks anew.
    """

    def __init__(self, uuid: str, library: Library) -> None:
        self.uuid = uuid
        self.library = library
        self.lost: str | None = None
        self.found = 0
        self._handle: Any = None
        self._opened = 0
        self._look_at = -math.inf
        self._others: dict[str, Asking] = {}

    @property
    def handle(self) -> Any:
        """The device handle; None before it is found, and while the GPU is lost."""
        return self._handle if self._opened == self.library.opened else None

    def find(self) -> bool:
        """Look for the handle, at most every 5 s. A lost GPU stays lost until a call answers."""
        if self.handle is not None:
            return True
        now = self.library.clock()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_AGAIN_S
        try:
            self.library.reopen()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_UNINITIALIZED:
                self.library.closed()
            self.lost = self.lost or f"not found: {error}"
            return False
        self._opened = self.library.opened
        self.found += 1
        self._others = {}
        return True

    def asking(self, what: str, readers: int = 1) -> Asking:
        """Return what is known of a question; forgotten when the GPU was lost and found again."""
        known = self._others.get(what)
        if known is None:
            known = self._others[what] = Asking(what, readers)
        return known

    def questions(self) -> dict[str, Asking]:
        """Return the questions asked so far, by name."""
        return self._others

    def ask(
        self, asking: Asking, calls: Sequence[Callable[[Any], T]], *, tries: int = 2
    ) -> T | None:
        """Ask the driver, if it is time to; None, with `asking.reason`, where it does not answer.

        `calls` are the alternatives, each with the handle as its only argument; `tries` says how
        many calls there may be now: one alternative or repeat.
        """
        clock = self.library.clock
        for _ in range(tries):
            begun = clock()
            if asking.off or begun < asking.retry_at or self.handle is None:
                return None
            try:
                answer = calls[asking.reader](self.handle)
            except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
                if not self.failed(asking, error):
                    return None
            else:
                self.answered(asking)
                now = clock()
                asking.measure(now - begun)
                asking.rest(now)
                asking.took(now, now - begun)
                return answer
        return None

    def answered(self, asking: Asking) -> None:
        """Note that a question was answered, so that the GPU is there."""
        self.lost = None
        asking.answer()

    def failed(self, asking: Asking, error: Exception) -> bool:
        """Apply the error policy to what pynvml raised; True asks for another try at once."""
        if isinstance(error, pynvml.NVMLLibraryMismatchError):  # not an NVMLError
            return asking.unsupported(NOT_BY_DRIVER)
        if not isinstance(error, pynvml.NVMLError):
            asking.back_off(self.library.clock(), f"{type(error).__name__}: {error}")
            return False
        step, reason = judge(error.value, asking.answered)
        match step:
            case Step.ALTERNATIVE:
                return asking.unsupported(reason)
            case Step.OFF:
                asking.turn_off(reason)
            case Step.LOST:
                self._handle, self.lost = None, f"lost: {error}"
                self._look_at = self.library.clock() + LOOK_AGAIN_S
            case Step.REOPEN:
                self.library.closed()
            case Step.AGAIN:
                asking.reason = reason
                return True
            case Step.NEXT_TIME:
                asking.reason = reason
            case Step.PAUSE:
                asking.back_off(self.library.clock(), str(error))
        return False


def static(call: Callable[..., Any], *args: Any) -> Any:
    """Ask once for what does not change; None if the driver does not give it."""
    try:
        return call(*args)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
        log.info("%s: %s", call.__name__, error)
        return None


def _major(version: str | None) -> int | None:
    first = (version or "").partition(".")[0]
    return int(first) if first.isdecimal() else None
