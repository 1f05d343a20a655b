"""One GPU as NVML shows it: its handle, whether it is lost, and questions to the driver."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pynvml

from stepscope.gpu.asking import NOT_BY_DRIVER, Asking, Step, judge

log = logging.getLogger(__name__)

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
