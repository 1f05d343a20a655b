"""GPU values from NVML, the driver's own interface: one call gate, one error policy, UUIDs only.

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

from stepscope.sampling.nvml_fields import FIELDS, PLAUSIBLE, Field, Tier, memory_total, power_limit

log = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What does not change about a GPU; memory in bytes, power limit in watts."""

    uuid: str
    name: str
    nvml_index: int
    memory_total: int | None
    compute_capability: tuple[int, int] | None
    power_limit: float | None
    driver_version: str | None
    mig: bool


class DeviceSource(Protocol):
    """What the sampler and the pages ask of a source of GPU values."""

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
    """No GPU to read, and the sentence that says why; `retry_at` is when to look again."""

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

# NVML's return codes by what to do about them; every code not named here backs off.
_UNSUPPORTED = {
    3: "not supported on this GPU",
    13: "not offered by this driver",
    25: "not offered by this driver",
    26: "not offered by this driver",
}
_UNINITIALISED, _INVALID_ARGUMENT, _NO_PERMISSION, _INSUFFICIENT_SIZE = 1, 2, 4, 7
_NO_DATA = frozenset({0, 6, 10, 21})  # success with nothing, not found, timeout, no data
_LOST = frozenset({9, 15, 16, 28})  # driver gone, GPU lost, reset required, GPU not found
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

    Share one source between readers in turn; it holds no lock. It never shuts NVML down: repeated
    init cycles trouble some drivers, and a sick GPU can hang the call.
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
        """Look the handle up, at most every 5 s. A lost GPU counts as found once it answers."""
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
            self._initialized = self._initialized and error.value != _UNINITIALISED
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
                repeat = self._unsupported(entry, state, _UNSUPPORTED[13])
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
        """Apply the error policy; True asks for another try at once."""
        code = error.value
        # An unknown field id is an invalid argument too: only a call that once answered tells.
        if code in _UNSUPPORTED or (code == _INVALID_ARGUMENT and not state.answered):
            return self._unsupported(entry, state, _UNSUPPORTED.get(code, _UNSUPPORTED[3]))
        if code == _NO_PERMISSION:
            return _turn_off(entry, state, "permission")
        if code in _LOST or code == _INVALID_ARGUMENT:
            gpu.handle, gpu.lost = None, f"lost: {error}"
            gpu.look_at = self._clock() + _LOOK_AGAIN_S
            return False
        if code == _UNINITIALISED:  # somebody shut NVML down: the next read opens it again
            self._initialized = False
            for known in self._gpus.values():
                known.handle = None
            return False
        if code in _NO_DATA or code == _INSUFFICIENT_SIZE:
            state.reason = "no data"
            return bool(code == _INSUFFICIENT_SIZE)
        return self._back_off(entry, state, str(error))

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
        falls = key == "gpu/energy" and value < state.last  # driver reloaded: a new baseline
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
    total, limit = _static(memory_total, handle), _static(power_limit, handle)
    return DeviceInfo(
        uuid=uuid,
        name=_static(pynvml.nvmlDeviceGetName, handle) or "unknown GPU",
        nvml_index=index,
        memory_total=total[0] if total else None,
        compute_capability=_static(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        power_limit=limit[0] if limit else None,
        driver_version=driver,
        mig=(_static(pynvml.nvmlDeviceGetMigMode, handle) or [0])[0] == 1,
    )


def _static(call: Callable[..., Any], *args: Any) -> Any:
    """Ask for a fact once; None if the driver does not give it."""
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

_NO_SOURCE = {
    9: "The NVIDIA driver is not loaded.",
    12: "No NVIDIA driver library (libnvidia-ml.so.1) was found; in a container, "
    "ask for the driver capability 'utility'.",
    18: "The NVIDIA driver was updated while loaded: restart the machine.",
}
_WRONG_PACKAGE = (
    "The installed pynvml module is not NVIDIA's: run 'pip uninstall pynvml', "
    "then 'pip install --force-reinstall nvidia-ml-py'."
)
_OPEN_AGAIN_S = 30.0
_opened: dict[int, DeviceSource] = {}  # by process id: NVML does not survive a fork


def open_source(clock: Clock = time.monotonic) -> DeviceSource:
    """Return this process's source, opened on the first call (tens of ms on a GPU machine).

    Without a driver the answer is a `NullSource`, and a call 30 s later looks again. Two threads
    that open at once do no harm (NVML counts its inits), so there is no lock to inherit by fork.
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
        reason = _NO_SOURCE.get(error.value, f"NVML did not start: {error}.")
        return NullSource(reason, math.inf if error.value == 18 else retry_at)
    if not source.devices():
        return NullSource("The NVIDIA driver reports no GPU.", retry_at)
    return source
