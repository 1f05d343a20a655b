"""One NVML device, its calls, and the one rule for their errors.

A call that is not supported or not permitted has a reason for the life of the process. Any other
error is a reason for RETRY_S. A lost GPU has one reason for all calls until it is found again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

log = logging.getLogger(__name__)

NOT_BY_GPU = "not supported on this GPU"
NOT_BY_DRIVER = "not offered by this driver"
PERMISSION = "permission"
UNSUPPORTED = (NOT_BY_GPU, NOT_BY_DRIVER)
PERMANENT = (*UNSUPPORTED, PERMISSION)  # Reasons for the life of the process.
RETRY_S = 5.0  # Pause after an error, and between two searches for a lost GPU.

_REFUSALS = {
    3: NOT_BY_GPU,  # NVML_ERROR_NOT_SUPPORTED
    4: PERMISSION,  # NVML_ERROR_NO_PERMISSION
    13: NOT_BY_DRIVER,  # NVML_ERROR_FUNCTION_NOT_FOUND
    25: NOT_BY_DRIVER,  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    26: NOT_BY_DRIVER,  # NVML_ERROR_DEPRECATED
}
_LOST = (9, 15, 16, 28)  # DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND

Clock = Callable[[], float]
T = TypeVar("T")


class NvmlLibrary:
    """The initialized NVML that the GPUs of one source share."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.initializations = 1  # Each one invalidates the handles of those before.
        self.driver = call_or_none(pynvml.nvmlSystemGetDriverVersion)

    def reinitialize(self) -> bool:
        """Initialize NVML after a shutdown by other code; return False on failure."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            log.debug("nvmlInit: %s", error)
            return False
        self.initializations += 1
        return True


@dataclass(frozen=True, slots=True)
class _Failure:
    """Reason of a failed call, and the time of the next attempt."""

    reason: str
    retry_at: float


class NvmlDevice:
    """NVML device (GPU or MIG instance) addressed by UUID. Not thread-safe."""

    def __init__(self, uuid: str, library: NvmlLibrary) -> None:
        self.uuid = uuid
        self.library = library
        self.lost: str | None = None  # Why the GPU is unreachable.
        self.handle: Any = None
        self.found = 0  # Number of acquisitions of the handle.
        self._initialization = 0
        self._find_at = -math.inf
        self._failures: dict[Callable[..., Any], _Failure] = {}
        self._succeeded: set[Callable[..., Any]] = set()

    def find(self) -> bool:
        """Return True if the device has a handle; searches for a lost GPU every RETRY_S."""
        library = self.library
        if self.handle is not None and self._initialization == library.initializations:
            return True
        now = library.clock()
        if now < self._find_at:
            return False
        self._find_at = now + RETRY_S
        try:
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except Exception as error:  # noqa: BLE001 - also of a binding of another version
            if _code(error) == pynvml.NVML_ERROR_UNINITIALIZED:
                library.reinitialize()
            self.lost = self.lost or f"not found: {error}"
            return False
        self._initialization = library.initializations
        self._find_at = -math.inf
        self.found += 1
        self.lost = None
        return True

    def query(self, calls: Sequence[Callable[..., T]], *args: Any) -> T | None:
        """Return the result of the first supported call; None on failure (see `reason`).

        Each call gets the handle and `args`. A call that has failed is not repeated too early.
        """
        for call in calls:
            failure = self._failures.get(call)
            if failure is None or self.library.clock() >= failure.retry_at:
                if not self.find():
                    return None
                try:
                    result = call(self.handle, *args)
                except Exception as error:  # noqa: BLE001 - also of a binding of another version
                    failure = self._fail(call, error)
                else:
                    self._failures.pop(call, None)
                    self._succeeded.add(call)
                    return result
            if failure is None or failure.reason not in UNSUPPORTED:
                return None
        return None

    def reason(self, calls: Sequence[Callable[..., Any]]) -> str | None:
        """Return the reason for the failure of a query; None if there is none."""
        if self.lost is not None:
            return self.lost
        reason = None
        for call in calls:
            failure = self._failures.get(call)
            if failure is None:
                return None
            reason = failure.reason
            if reason not in UNSUPPORTED:
                break
        return reason

    def _fail(self, call: Callable[..., Any], error: Exception) -> _Failure | None:
        """Apply the error rule; return the failure of the call, None if the GPU is lost."""
        code = _code(error)
        now = self.library.clock()
        is_shut_down = code == pynvml.NVML_ERROR_UNINITIALIZED and not self.library.reinitialize()
        if code in _LOST or is_shut_down:
            self.handle = None
            self.lost = f"lost: {error}"
            self._find_at = now + RETRY_S
            return None
        if code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
            if call in self._succeeded:  # The argument was valid before: the handle is stale.
                self.handle = None
            else:
                code = pynvml.NVML_ERROR_NOT_SUPPORTED
        if code in _REFUSALS:
            failure = _Failure(_REFUSALS[code], math.inf)
        else:
            failure = _Failure(f"error: {error}", now + RETRY_S)
        self._failures[call] = failure
        return failure


def _code(error: Exception) -> int | None:
    """Return NVML's code of an error; None for one of the binding."""
    return error.value if isinstance(error, pynvml.NVMLError) else None


def nvml_call(name: str, *constants: str) -> Callable[..., Any]:
    """Return a function of a handle that calls pynvml's function `name`.

    The names are resolved at the call, so that an old or foreign pynvml does not break the import.
    """

    def call(handle: Any, *args: Any) -> Any:
        return getattr(pynvml, name)(handle, *(getattr(pynvml, one) for one in constants), *args)

    call.__name__ = name
    return call


def call_or_none(call: Callable[..., Any], *args: Any) -> Any:
    """Call the driver outside the error rule; return None on failure."""
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001 - also of a binding of another version
        log.debug("%s: %s", call.__name__, error)
        return None
