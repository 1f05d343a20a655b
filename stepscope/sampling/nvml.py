"""GPU values from NVML, the driver's own interface, under one error policy; GPUs are known by UUID.

`open_source()` gives a working `NvmlSource`, or a `NullSource` that says why there is none. A value
that the driver does not give is left out of the reading and explained by `reasons()`. Nothing here
calls CUDA. Not covered: readings of processes, PCIe, NVLink, ECC and GPM.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import pynvml

from stepscope.sampling.nvml_fields import FIELDS, PLAUSIBLE, Field, Tier, memory_total

log = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What does not change about a GPU; memory in bytes."""

    uuid: str
    name: str
    nvml_index: int
    memory_total: int | None
    driver_version: str | None
    mig: bool


class DeviceSource(Protocol):
    """A source of GPU values, for the sampler and the pages."""

    @property
    def reason(self) -> str | None:
        """Say why there is no GPU to read; None when there is one."""

    def devices(self) -> list[DeviceInfo]:
        """List the GPUs in NVML's order."""

    def read(self, uuid: str, *tiers: Tier) -> dict[str, float]:
        """Read these tiers of one GPU now: metric key -> value, missing values left out."""

    def reasons(self, uuid: str) -> dict[str, str]:
        """Say why metrics are missing from this GPU's readings: metric key -> reason."""

    def lost(self, uuid: str) -> str | None:
        """Say why this GPU cannot be reached; None while it can."""


@dataclass(frozen=True, slots=True)
class NullSource:
    """No GPU to read: `reason` is a sentence that says why, `retry_at` when to look again."""

    reason: str
    retry_at: float = math.inf

    def devices(self) -> list[DeviceInfo]:
        return []

    def read(self, uuid: str, *tiers: Tier) -> dict[str, float]:
        return {}

    def reasons(self, uuid: str) -> dict[str, str]:
        return {}

    def lost(self, uuid: str) -> str | None:
        return None


# --- the source -----------------------------------------------------------------------------------

_NOT_BY_GPU, _NOT_BY_DRIVER = "not supported on this GPU", "not offered by this driver"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LOOK_AGAIN_S = 5.0  # for a lost GPU


@dataclass(slots=True)
class _FieldState:
    reader: int = 0
    off: bool = False
    answered: bool = False
    retry_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    last: float = -math.inf
    reason: str | None = None


@dataclass(slots=True)
class _Gpu:
    """What is known of one GPU; `handle` is None until it is found, and while it is lost."""

    handle: Any = None
    lost: str | None = None
    look_at: float = 0.0
    states: list[_FieldState] = field(default_factory=lambda: [_FieldState() for _ in FIELDS])


class NvmlSource:
    """Reads GPUs through an initialized NVML; handles come by UUID, a MIG instance's included.

    It holds no lock, so only one thread at a time may read. It never shuts NVML down: some drivers
    fail after repeated inits, and a broken GPU can hang the call.
    """

    reason: str | None = None

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._initialized = True
        self._infos = _list_devices()
        self._gpus: dict[str, _Gpu] = {}

    def devices(self) -> list[DeviceInfo]:
        """List the GPUs found at opening, in NVML's order (not CUDA's)."""
        return list(self._infos)

    def read(self, uuid: str, *tiers: Tier) -> dict[str, float]:
        """Read these tiers of one GPU now; missing values are left out. Never raises NVMLError."""
        gpu = self._gpus.setdefault(uuid, _Gpu())
        values: dict[str, float] = {}
        if gpu.handle is None and not self._find(uuid, gpu):
            return values
        for entry, state in zip(FIELDS, gpu.states, strict=True):
            if entry.tier in tiers and gpu.handle is not None:
                values |= self._read_field(gpu, entry, state)
        return values

    def reasons(self, uuid: str) -> dict[str, str]:
        """Say why metrics are missing: those asked for so far, or all of them of a lost GPU."""
        gpu = self._gpus.get(uuid, _Gpu())
        found: dict[str, str] = {}
        for entry, state in zip(FIELDS, gpu.states, strict=True):
            reason = gpu.lost or state.reason
            if reason is not None:
                found |= dict.fromkeys(entry.keys, reason)
        return found

    def lost(self, uuid: str) -> str | None:
        """Say why this GPU cannot be reached; None while it can (or before the first read)."""
        return self._gpus[uuid].lost if uuid in self._gpus else None

    def _find(self, uuid: str, gpu: _Gpu) -> bool:
        """Look the handle up, at most every 5 s. A lost GPU stays lost until a read succeeds."""
        now = self._clock()
        if now < gpu.look_at:
            return False
        gpu.look_at = now + _LOOK_AGAIN_S
        try:
            if not self._initialized:
                pynvml.nvmlInit()
                self._initialized = True
            gpu.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_UNINITIALIZED:
                self._initialized = False
            gpu.lost = gpu.lost or f"not found: {error}"
            return False
        gpu.states = [_FieldState() for _ in FIELDS]
        return True

    def _read_field(self, gpu: _Gpu, entry: Field, state: _FieldState) -> dict[str, float]:
        for _ in range(2):  # at most one alternative or repeat in the same tick
            if state.off or self._clock() < state.retry_at:
                break
            try:
                raw = entry.readers[state.reader](gpu.handle)
            except pynvml.NVMLLibraryMismatchError:  # not an NVMLError
                repeat = self._unsupported(entry, state, _NOT_BY_DRIVER)
            except pynvml.NVMLError as error:
                repeat = self._failed(gpu, entry, state, error)
            except (AttributeError, OSError, ValueError, LookupError) as error:
                repeat = self._back_off(entry, state, f"{type(error).__name__}: {error}")
            else:
                return _accept(gpu, entry, state, raw)
            if not repeat:
                break
        return {}

    def _failed(self, gpu: _Gpu, entry: Field, state: _FieldState, error: Any) -> bool:
        """Apply the error policy by NVML's return code; True asks for another try at once."""
        match error.value:
            case pynvml.NVML_ERROR_NOT_SUPPORTED:
                return self._unsupported(entry, state, _NOT_BY_GPU)
            case (
                pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
                | pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
                | pynvml.NVML_ERROR_DEPRECATED
            ):
                return self._unsupported(entry, state, _NOT_BY_DRIVER)
            case pynvml.NVML_ERROR_INVALID_ARGUMENT if not state.answered:  # unknown to the driver
                return self._unsupported(entry, state, _NOT_BY_GPU)
            case pynvml.NVML_ERROR_NO_PERMISSION:
                return _turn_off(entry, state, "permission")
            case (
                pynvml.NVML_ERROR_DRIVER_NOT_LOADED
                | pynvml.NVML_ERROR_GPU_IS_LOST
                | pynvml.NVML_ERROR_RESET_REQUIRED
                | pynvml.NVML_ERROR_GPU_NOT_FOUND
                | pynvml.NVML_ERROR_INVALID_ARGUMENT  # what was valid before: the handle is not now
            ):
                gpu.handle, gpu.lost = None, f"lost: {error}"
                gpu.look_at = self._clock() + _LOOK_AGAIN_S
            case pynvml.NVML_ERROR_UNINITIALIZED:  # shut down by other code: the next read opens it
                self._initialized = False
                for known in self._gpus.values():
                    known.handle = None
            case pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                state.reason = "no data"
                return True
            case (
                pynvml.NVML_SUCCESS
                | pynvml.NVML_ERROR_NOT_FOUND
                | pynvml.NVML_ERROR_TIMEOUT
                | pynvml.NVML_ERROR_NO_DATA
            ):
                state.reason = "no data"
            case _:
                self._back_off(entry, state, str(error))
        return False

    def _unsupported(self, entry: Field, state: _FieldState, reason: str) -> bool:
        if state.reader + 1 < len(entry.readers):
            state.reader += 1
            return True
        return _turn_off(entry, state, reason)

    def _back_off(self, entry: Field, state: _FieldState, reason: str) -> bool:
        if state.pause_s == _FIRST_PAUSE_S:
            log.warning("%s: %s; asking again less often", ", ".join(entry.keys), reason)
        state.reason = f"error: {reason}"
        state.retry_at = self._clock() + state.pause_s
        state.pause_s = min(2 * state.pause_s, _LONGEST_PAUSE_S)
        return False


def _turn_off(entry: Field, state: _FieldState, reason: str) -> bool:
    log.info("%s: %s; not asked again", ", ".join(entry.keys), reason)
    state.off, state.reason = True, reason
    return False


def _accept(
    gpu: _Gpu, entry: Field, state: _FieldState, raw: tuple[float, ...]
) -> dict[str, float]:
    """Keep the plausible values of a call that answered."""
    gpu.lost, state.answered, state.reason, state.pause_s = None, True, None, _FIRST_PAUSE_S
    values: dict[str, float] = {}
    for key, value in zip(entry.keys, raw, strict=True):
        low, high = PLAUSIBLE[key]
        falls = key == "gpu/energy" and value < state.last  # the driver was loaded again
        state.last = value
        if low <= value <= high and not falls:
            values[key] = float(value)
        else:
            state.reason = "implausible value dropped"
    return values


def _list_devices() -> list[DeviceInfo]:
    driver = _static(pynvml.nvmlSystemGetDriverVersion)
    infos = (_describe(index, driver) for index in range(pynvml.nvmlDeviceGetCount()))
    return [info for info in infos if info is not None]


def _describe(index: int, driver: str | None) -> DeviceInfo | None:
    handle = _static(pynvml.nvmlDeviceGetHandleByIndex, index)
    uuid = None if handle is None else _static(pynvml.nvmlDeviceGetUUID, handle)
    if uuid is None:
        log.warning("GPU %d of NVML cannot be reached and is left out", index)
        return None
    total = _static(memory_total, handle)
    mig, _pending = _static(pynvml.nvmlDeviceGetMigMode, handle) or (None, None)
    return DeviceInfo(
        uuid=uuid,
        name=_static(pynvml.nvmlDeviceGetName, handle) or "unknown GPU",
        nvml_index=index,
        memory_total=total[0] if total else None,
        driver_version=driver,
        mig=mig == pynvml.NVML_DEVICE_MIG_ENABLE,
    )


def _static(call: Callable[..., Any], *args: Any) -> Any:
    """Ask once for what does not change; None if the driver does not give it."""
    try:
        return call(*args)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, OSError, ValueError) as error:
        log.info("%s: %s", call.__name__, error)
        return None


def nvml_uuid(uuid: str, name: str) -> str:
    """Return the UUID of a CUDA device as NVML prints it; torch leaves out the prefix.

    CUDA names an instance after its GPU and profile: "NVIDIA H200 MIG 1g.18gb".
    """
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    return f"MIG-{uuid}" if " MIG " in name else f"GPU-{uuid}"


# --- opening --------------------------------------------------------------------------------------

_NO_LIBRARY = (
    "No NVIDIA driver library (libnvidia-ml.so.1) was found; in a container, "
    "ask for the driver capability 'utility'."
)
_WRONG_PACKAGE = (
    "The installed pynvml module is not NVIDIA's: run 'pip uninstall pynvml', "
    "then 'pip install --force-reinstall nvidia-ml-py'."
)
_OPEN_AGAIN_S = 30.0
_opened: dict[int, DeviceSource] = {}  # by process id: a forked child has to open NVML again


def open_source(clock: Clock = time.monotonic) -> DeviceSource:
    """Return this process's source, opened on the first call (tens of ms on a GPU machine).

    Without a driver it returns a `NullSource`, and a call 30 s later looks again. There is no lock,
    which a fork could leave locked: two threads that open at once do no harm, NVML counts inits.
    """
    source = _opened.get(os.getpid())
    if source is None or (isinstance(source, NullSource) and clock() >= source.retry_at):
        source = _opened[os.getpid()] = _open(clock)
    return source


def _open(clock: Clock) -> DeviceSource:
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        return NullSource(_WRONG_PACKAGE)
    retry_at = clock() + _OPEN_AGAIN_S
    try:
        pynvml.nvmlInit()
        source = NvmlSource(clock)
    except pynvml.NVMLError as error:
        match error.value:
            case pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                return NullSource("The NVIDIA driver is not loaded.", retry_at)
            case pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                return NullSource(_NO_LIBRARY, retry_at)
            case pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                return NullSource(
                    "The NVIDIA driver was updated while loaded: restart the machine."
                )
        return NullSource(f"NVML did not start: {error}.", retry_at)
    if not source.devices():
        return NullSource("The NVIDIA driver reports no GPU.", retry_at)
    return source
