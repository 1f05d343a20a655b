"""Sources of GPU values: NVML, the driver's interface to NVIDIA GPUs, or none."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from stepscope.gpu.device_info import DeviceInfo, DeviceProperties, describe, parent_uuid
from stepscope.gpu.gpm import SHARES, GpmReader
from stepscope.gpu.nvml_device import Clock, NvmlDevice, NvmlLibrary, static
from stepscope.gpu.nvml_queries import FIELDS, SamplingTier, field_number, memory_total
from stepscope.gpu.nvml_reader import NvmlReader
from stepscope.gpu.processes import GpuProcess, GpuProcessList, ProcessInfoCache

log = logging.getLogger(__name__)


class DeviceSource:
    """A source of GPU values; this base class has no GPU. Not thread-safe."""

    reason: str | None = None  # Reason for missing GPUs; None if there are GPUs.
    retry_at: float = math.inf  # Time of the next attempt to find GPUs.

    def devices(self) -> list[DeviceInfo]:
        """Return the GPUs found at initialization, in NVML's order (not CUDA's)."""
        return []

    def instances(self, uuid: str) -> list[DeviceInfo]:
        """Return the MIG instances of a GPU, which support `read`, `facts` and `processes`."""
        return []

    def facts(self, uuid: str) -> DeviceProperties | None:
        """Return the properties of a GPU or an instance, the last ones if it is lost, or None."""
        return None

    def read(self, uuid: str, *tiers: SamplingTier) -> dict[str, float]:
        """Return the values of these tiers of one GPU by metric key, without missing values."""
        return {}

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a GPU; None if they are hidden (see `reasons`)."""
        return None

    def recovery_action(self, uuid: str) -> str | None:
        """Return the driver's recovery action for a GPU as text; None for none or unknown."""
        return None

    def arm_gpm(self, on: bool) -> None:
        """Read the activity counters of newer GPUs from now on; each True needs one False."""

    def reasons(self, uuid: str) -> dict[str, str]:
        """Return the reasons for missing metrics, and "processes", by key, of queries so far."""
        return {}

    def lost(self, uuid: str) -> str | None:
        """Return the reason why this GPU is unreachable; None while it is reachable."""
        return None


class NullSource(DeviceSource):
    """A source without GPUs, for a `reason` (a sentence)."""

    def __init__(self, reason: str, retry_at: float = math.inf) -> None:
        self.reason = reason
        self.retry_at = retry_at


PCIE = {"gpu/pcie_tx", "gpu/pcie_rx"}  # GPM is faster: each byte counter takes 0.5 ms (docs/gpu).
RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
RECOVERY_ACTIONS = {
    1: "the GPU has to be reset",
    2: "the machine has to be restarted",
    3: "work that uses peer-to-peer copies has to end",
    4: "all work on the GPU has to end, then it has to be reset",
    5: "the IMEX domain has to be recovered",
    6: "the GPU's bus has to be reset",
    7: "the machine has to be restarted",
}
"""nvmlDeviceGpuRecoveryAction_t; 0 is no action."""


@dataclass(slots=True)
class _Known:
    """Readers of one GPU, valid until the GPU is lost."""

    gpu: NvmlDevice
    values: NvmlReader
    activity: GpmReader
    processes: GpuProcessList


class NvmlSource(DeviceSource):
    """Source of the GPUs and MIG instances of an initialized NVML.

    Never shuts NVML down: some drivers fail after repeated initializations, and a broken GPU can
    block the call.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._library = NvmlLibrary(clock)
        self._infos = _list_devices(self._library)
        self._names = ProcessInfoCache(clock=clock)
        self._gpus: dict[str, NvmlDevice] = {}
        self._known: dict[str, _Known] = {}
        self._facts: dict[str, DeviceProperties] = {}
        self._armed = 0

    def devices(self) -> list[DeviceInfo]:
        return list(self._infos)

    def read(self, uuid: str, *tiers: SamplingTier) -> dict[str, float]:
        known = self._find(uuid)
        if known is None:
            return {}
        values = known.values.read(tiers)
        if self._armed and SamplingTier.MEDIUM in tiers:
            counted = known.values.counted()
            active = known.activity.read()
            values |= {key: active[key] for key in active if key not in counted}
            known.values.left_out = known.activity.given & PCIE
        elif not self._armed:
            known.values.left_out = frozenset()
        return values

    def reasons(self, uuid: str) -> dict[str, str]:
        gpu, known = self._gpus.get(uuid), self._known.get(uuid)
        if gpu is not None and gpu.lost is not None:
            keys = {key for entry in FIELDS for key in entry.keys} | {*SHARES}
            return dict.fromkeys(keys, gpu.lost)
        if known is None:
            return {}
        reasons = known.values.reasons() | known.processes.reasons()
        reasons |= known.activity.reasons(armed=self._armed > 0)
        return {key: text for key, text in reasons.items() if key not in known.activity.given}

    def lost(self, uuid: str) -> str | None:
        return self._gpus[uuid].lost if uuid in self._gpus else None

    def facts(self, uuid: str) -> DeviceProperties | None:
        known = self._find(uuid)
        if known is None:
            return self._facts.get(uuid)
        info = self._info(uuid)
        if info is None:  # an instance, which has the index of its parent
            parent = self._info(parent_uuid(known.gpu.handle) or "")
            index = -1 if parent is None else parent.nvml_index
            info = _described(known.gpu.handle, uuid, index, self._library)
        self._facts[uuid] = facts = describe(known.gpu.handle, info)
        return facts

    def instances(self, uuid: str) -> list[DeviceInfo]:
        known = self._find(uuid)
        parent = self._info(uuid)
        if known is None or parent is None or not parent.mig:
            return []
        asking = known.gpu.asking("MIG instances")
        count = known.gpu.ask(asking, (pynvml.nvmlDeviceGetMaxMigDeviceCount,)) or 0
        instances = []
        for index in range(count):  # the indices of instances have gaps
            handle = static(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, known.gpu.handle, index)
            name = None if handle is None else static(pynvml.nvmlDeviceGetUUID, handle)
            if name is not None:
                instances.append(_described(handle, name, parent.nvml_index, self._library))
        return instances

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        known = self._find(uuid)
        return None if known is None else known.processes.read()

    def recovery_action(self, uuid: str) -> str | None:
        known = self._find(uuid)
        if known is None:
            return None
        asking = known.gpu.asking("recovery action")
        number = known.gpu.ask(asking, (lambda handle: field_number(handle, RECOVERY_FIELD),))
        return RECOVERY_ACTIONS.get(int(number), f"action {number:g}") if number else None

    def arm_gpm(self, on: bool) -> None:
        self._armed = max(0, self._armed + (1 if on else -1))
        if not self._armed:
            for known in self._known.values():
                known.activity.rest()

    def _find(self, uuid: str) -> _Known | None:
        """Return the readers of a reachable GPU, new ones after each acquisition of the handle."""
        gpu = self._gpus.get(uuid)
        if gpu is None:
            gpu = self._gpus[uuid] = NvmlDevice(uuid, self._library)
        found = gpu.found
        if not gpu.find():
            return None
        known = self._known.get(uuid)
        if known is None or gpu.found != found:
            if known is not None:
                known.activity.close()
            self._update_mig_mode(gpu)
            known = self._known[uuid] = _Known(
                gpu, NvmlReader(gpu), GpmReader(gpu), GpuProcessList(gpu, self._names)
            )
        return known

    def _update_mig_mode(self, gpu: NvmlDevice) -> None:
        """Read the MIG mode of a GPU, which a reset can change."""
        mig = None if self._info(gpu.uuid) is None else _is_divided(gpu.handle)
        if mig is not None:
            self._infos = [
                replace(info, mig=mig) if info.uuid == gpu.uuid else info for info in self._infos
            ]

    def _info(self, uuid: str) -> DeviceInfo | None:
        return next((info for info in self._infos if info.uuid == uuid), None)


def _list_devices(library: NvmlLibrary) -> list[DeviceInfo]:
    devices = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = static(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else static(pynvml.nvmlDeviceGetUUID, handle)
        if uuid is None:
            log.warning("GPU %d of NVML is unreachable and omitted", index)
        else:
            divided = _is_divided(handle) or False
            devices.append(_described(handle, uuid, index, library, mig=divided))
    return devices


def _is_divided(handle: Any) -> bool | None:
    """Return True for a GPU in MIG mode; None if the driver does not report the mode."""
    mode = static(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else bool(mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)


def _described(
    handle: Any, uuid: str, index: int, library: NvmlLibrary, mig: bool = False
) -> DeviceInfo:
    return DeviceInfo(
        uuid=uuid,
        name=static(pynvml.nvmlDeviceGetName, handle) or "unknown GPU",
        nvml_index=index,
        memory_total=static(memory_total, handle),
        driver_version=library.driver,
        mig=mig,
    )


def nvml_uuid(uuid: str, name: str) -> str:
    """Return NVML's UUID of a CUDA device: torch omits the prefix."""
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    # CUDA's name of an instance has its GPU and profile: "NVIDIA H200 MIG 1g.18gb".
    return f"MIG-{uuid}" if " MIG " in name else f"GPU-{uuid}"


def is_simulated(uuid: str) -> bool:
    """Return True for a GPU of the simulator, by its reserved UUID (simulator/src/shared.h)."""
    return uuid[4:].startswith("c0da5130-0000-4000-8000-0000000000")


_NO_LIBRARY = (
    "No NVIDIA driver library (libnvidia-ml.so.1) was found; in a container, "
    "ask for the driver capability 'utility'."
)
_NO_GPU = "The NVIDIA driver reports no GPU."
WITHOUT_GPU = frozenset({_NO_LIBRARY, _NO_GPU})  # Machines without a GPU; all else is a failure.
_WRONG_PACKAGE = (
    "The installed pynvml module is not NVIDIA's: run 'pip uninstall pynvml', "
    "then 'pip install --force-reinstall nvidia-ml-py'."
)
_OPEN_AGAIN_S = 30.0
# By pid, because a forked child has to open NVML again, and by reader.
_opened: dict[tuple[int, str], DeviceSource] = {}


def open_source(clock: Clock = time.monotonic, *, reader: str = "sampler") -> DeviceSource:
    """Return this process's source, opened on the first call (tens of ms on a GPU machine).

    Each `reader` has a separate source: rates are means since its last reading, and a source is
    not thread-safe. Without a driver it returns a `NullSource`, and retries after 30 s. There is no
    lock, which a fork could leave locked: NVML counts its initializations.
    """
    key = os.getpid(), reader
    source = _opened.get(key)
    if source is None or clock() >= source.retry_at:
        source = _opened[key] = _open(clock)
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
        return NullSource(_NO_GPU, retry_at)
    return source
