"""NVML devices: handles, and calls with an error policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import pynvml

from stepscope.host.environment import under_wsl

log = logging.getLogger(__name__)

NOT_BY_GPU, NOT_BY_DRIVER = "not supported on this GPU", "not offered by this driver"
NOT_UNDER_WSL = "not supported on this GPU or under WSL2"
NO_DATA, PERMISSION = "no data", "permission"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
SLOW_S, SLOW_CALLS, SELDOM_S = 0.02, 3, 1.0  # Minimum period SELDOM_S after slow calls in a row.


class ErrorAction(Enum):
    """Reaction to an NVML error."""

    ALTERNATIVE = auto()
    OFF = auto()
    NEXT_TIME = auto()
    PAUSE = auto()
    LOST = auto()
    REOPEN = auto()


_POLICY: dict[int, tuple[ErrorAction, str]] = {
    1: (ErrorAction.REOPEN, ""),  # NVML_ERROR_UNINITIALIZED: other code has shut NVML down
    3: (ErrorAction.ALTERNATIVE, NOT_BY_GPU),  # NOT_SUPPORTED
    4: (ErrorAction.OFF, PERMISSION),  # NO_PERMISSION
    # FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED
    **dict.fromkeys((13, 25, 26), (ErrorAction.ALTERNATIVE, NOT_BY_DRIVER)),
    # DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND
    **dict.fromkeys((9, 15, 16, 28), (ErrorAction.LOST, "lost")),
    # SUCCESS, NOT_FOUND, INSUFFICIENT_SIZE, TIMEOUT, NO_DATA
    **dict.fromkeys((0, 6, 7, 10, 21), (ErrorAction.NEXT_TIME, NO_DATA)),
}


@dataclass(slots=True)
class QueryState:
    """State of one query of one GPU; `readers` counts its alternatives, `rest_s` is its period."""

    what: str
    readers: int = 1
    rest_s: float = 0.0
    reader: int = 0
    off: bool = False
    answered: bool = False
    retry_at: float = -math.inf
    pause_s: float = FIRST_PAUSE_S
    reason: str | None = None
    slow_calls: int = 0

    def answer(self, now: float, seconds: float) -> None:
        """Record a successful call with its duration."""
        self.answered, self.reason, self.pause_s = True, None, FIRST_PAUSE_S
        self.slow_calls = self.slow_calls + 1 if seconds > SLOW_S else 0
        if self.slow_calls == SLOW_CALLS:
            log.warning("%s: %.0f ms per call; limited to one a second", self.what, 1e3 * seconds)
        self.rest(now, SELDOM_S if self.slow_calls >= SLOW_CALLS else 0.0)

    def rest(self, now: float, least_s: float = 0.0) -> None:
        """Make the next call after `rest_s` or `least_s`, whichever is longer."""
        self.retry_at = now + max(self.rest_s, least_s)

    def unsupported(self, reason: str) -> bool:
        """Switch to the next reader; without one turn the query off and return False."""
        if self.reader + 1 < self.readers:
            self.reader += 1
            return True
        self.turn_off(reason)
        return False

    def turn_off(self, reason: str) -> None:
        """Disable the query, and log it."""
        log.info("%s: %s; not queried again", self.what, reason)
        self.off, self.reason, self.retry_at = True, reason, math.inf

    def back_off(self, now: float, reason: str) -> None:
        """Retry after a pause, which doubles each time; log the first failure."""
        if self.pause_s == FIRST_PAUSE_S:
            log.warning("%s: %s; retrying less often", self.what, reason)
        self.reason = f"error: {reason}"
        self.retry_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


Clock = Callable[[], float]
T = TypeVar("T")

LOOK_AGAIN_S = 5.0  # Period of the search for a lost GPU.
BINDING_ERRORS = (AttributeError, OSError, ValueError, LookupError)
"""Further exceptions of a pynvml that does not match the installed library."""


def driver_errors() -> tuple[type[Exception], ...]:
    """Return all exceptions of a call; not a constant, as another package may be named pynvml."""
    return pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS


class NvmlLibrary:
    """The initialized NVML that the GPUs of one source share."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.opened = 1  # Initializations: a shutdown by other code invalidates all handles.
        self._open = True
        self.driver = static(pynvml.nvmlSystemGetDriverVersion)
        self._wsl = under_wsl()
        major = (self.driver or "").partition(".")[0]
        self.major = int(major) if major.isdecimal() else None

    def judge(self, code: int, answered: bool) -> tuple[ErrorAction, str]:
        """Return the reaction to a return code, and the reason; `answered`: it succeeded before."""
        step, reason = _POLICY.get(code, (ErrorAction.PAUSE, "error"))
        if code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
            # An argument that was valid before: the handle is invalid.
            step = ErrorAction.LOST if answered else ErrorAction.ALTERNATIVE
            reason = "lost" if answered else NOT_BY_GPU
        return step, NOT_UNDER_WSL if self._wsl and reason == NOT_BY_GPU else reason

    def reopen(self) -> None:
        """Initialize NVML again after a shutdown by other code. Raises NVMLError."""
        if not self._open:
            pynvml.nvmlInit()
            self._open = True

    def closed(self) -> None:
        """Record that NVML was shut down, which invalidates all handles."""
        if self._open:
            self._open = False
            self.opened += 1


class NvmlDevice:
    """NVML device (GPU or MIG instance) addressed by UUID. Not thread-safe."""

    def __init__(self, uuid: str, library: NvmlLibrary) -> None:
        self.uuid = uuid
        self.library = library
        self.lost: str | None = None
        self.found = 0  # Acquisitions of the handle; query states of earlier ones are invalid.
        self._handle: Any = None
        self._opened = 0
        self._look_at = -math.inf
        self._others: dict[str, QueryState] = {}

    @property
    def handle(self) -> Any:
        """The device handle; None before `find`, and while the GPU is lost."""
        return self._handle if self._opened == self.library.opened else None

    def find(self) -> bool:
        """Acquire the handle, at most every 5 s. A lost GPU stays lost until a call succeeds."""
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

    def asking(self, what: str, readers: int = 1, rest_s: float = 0.0) -> QueryState:
        """Return the state of a query; a GPU that was lost and found has new states."""
        return self._others.setdefault(what, QueryState(what, readers, rest_s))

    def ask(self, asking: QueryState, calls: Sequence[Callable[[Any], T]]) -> T | None:
        """Call the driver if the query is due; return None, with `asking.reason`, on failure.

        `calls` are the alternatives, each with the handle as its only argument. After a failure one
        more alternative is tried immediately.
        """
        clock = self.library.clock
        for _ in range(2):
            begun = clock()
            if begun < asking.retry_at or self.handle is None:
                return None
            try:
                answer = calls[asking.reader](self.handle)
            except driver_errors() as error:
                if not self.failed(asking, error):
                    return None
            else:
                self.answered(asking, begun)
                return answer
        return None

    def answered(self, asking: QueryState, begun: float) -> None:
        """Record a successful call that started at `begun`."""
        self.lost = None
        now = self.library.clock()
        asking.answer(now, now - begun)

    def failed(self, asking: QueryState, error: Exception) -> bool:
        """Apply the error policy to an exception of pynvml; return True to retry immediately."""
        now = self.library.clock()
        if isinstance(error, pynvml.NVMLLibraryMismatchError):  # not an NVMLError
            return asking.unsupported(NOT_BY_DRIVER)
        if not isinstance(error, pynvml.NVMLError):
            asking.back_off(now, f"{type(error).__name__}: {error}")
            return False
        step, reason = self.library.judge(error.value, asking.answered)
        match step:
            case ErrorAction.ALTERNATIVE:
                return asking.unsupported(reason)
            case ErrorAction.OFF:
                asking.turn_off(reason)
            case ErrorAction.LOST:
                self._handle, self.lost = None, f"lost: {error}"
                self._look_at = now + LOOK_AGAIN_S
            case ErrorAction.REOPEN:
                self.library.closed()
            case ErrorAction.NEXT_TIME:
                asking.reason = reason
                asking.rest(now)
            case ErrorAction.PAUSE:
                asking.back_off(now, str(error))
        return False


def static(call: Callable[..., Any], *args: Any) -> Any:
    """Call the driver without the error policy; None on failure."""
    try:
        return call(*args)
    except driver_errors() as error:
        log.debug("%s: %s", call.__name__, error)
        return None
