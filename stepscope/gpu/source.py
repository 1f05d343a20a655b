"""Sources of GPU values: NVML, the driver's interface to NVIDIA GPUs, or none."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any

import pynvml

from stepscope.gpu.device_info import (
    DeviceInfo,
    DeviceProperties,
    is_divided,
    parent_uuid,
    properties,
)
from stepscope.gpu.gpm import GpmReader
from stepscope.gpu.nvml_device import Clock, NvmlDevice, NvmlLibrary, call_or_none, nvml_call
from stepscope.gpu.nvml_queries import NvmlReader, SamplingTier, memory_total
from stepscope.gpu.processes import GpuProcess, GpuProcessList

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


_MAX_INSTANCES = (nvml_call("nvmlDeviceGetMaxMigDeviceCount"),)


class _Gpu:
    """The readers of one GPU or MIG instance."""

    def __init__(self, uuid: str, library: NvmlLibrary) -> None:
        self.device = NvmlDevice(uuid, library)
        self.values = NvmlReader(self.device)
        self.activity = GpmReader(self.device)
        self.processes = GpuProcessList(self.device)
        self.facts: DeviceProperties | None = None


class NvmlSource(DeviceSource):
    """Source of the GPUs and MIG instances of an initialized NVML.

    Never shuts NVML down: some drivers fail after repeated initializations, and a broken GPU can
    block the call.
    """

    def __init__(self, clock: Clock = time.monotonic, *, reads_activity: bool = True) -> None:
        self._library = NvmlLibrary(clock)
        self._infos = {info.uuid: info for info in _list_devices(self._library)}
        self._gpus: dict[str, _Gpu] = {}
        self._reads_activity = reads_activity

    def devices(self) -> list[DeviceInfo]:
        return list(self._infos.values())

    def read(self, uuid: str, *tiers: SamplingTier) -> dict[str, float]:
        gpu = self._gpu(uuid)
        # GPM is cheaper than the counters of links, which take 0.25 ms each (docs/gpu).
        values = gpu.values.read(tiers, gpu.activity.given)
        if self._reads_activity and SamplingTier.MEDIUM in tiers:
            values |= gpu.activity.read()
        return values

    def reasons(self, uuid: str) -> dict[str, str]:
        gpu = self._gpu(uuid)
        reasons = gpu.values.reasons() | gpu.processes.reasons()
        if self._reads_activity and (gpu.device.found or gpu.device.lost):
            reasons |= gpu.activity.reasons()
        return {key: text for key, text in reasons.items() if key not in gpu.activity.given}

    def lost(self, uuid: str) -> str | None:
        return self._gpu(uuid).device.lost

    def facts(self, uuid: str) -> DeviceProperties | None:
        gpu = self._gpu(uuid)
        if gpu.device.find():
            handle = gpu.device.handle
            info = self._infos.get(uuid)
            if info is None:  # an instance, which has the index of its parent
                parent = self._infos.get(parent_uuid(handle) or "")
                index = -1 if parent is None else parent.nvml_index
                info = _info(handle, uuid, index, self._library)
            gpu.facts = properties(handle, info)
        return gpu.facts

    def instances(self, uuid: str) -> list[DeviceInfo]:
        device = self._gpu(uuid).device
        parent = self._infos.get(uuid)
        if parent is None or not parent.mig or not device.find():
            return []
        instances = []
        for index in range(device.query(_MAX_INSTANCES) or 0):  # the indices have gaps
            handle = call_or_none(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device.handle, index)
            name = None if handle is None else call_or_none(pynvml.nvmlDeviceGetUUID, handle)
            if name is not None:
                instances.append(_info(handle, name, parent.nvml_index, self._library))
        return instances

    def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        return self._gpu(uuid).processes.read()

    def _gpu(self, uuid: str) -> _Gpu:
        if uuid not in self._gpus:
            self._gpus[uuid] = _Gpu(uuid, self._library)
        return self._gpus[uuid]


def _list_devices(library: NvmlLibrary) -> list[DeviceInfo]:
    devices = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = call_or_none(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else call_or_none(pynvml.nvmlDeviceGetUUID, handle)
        if uuid is None:
            log.warning("GPU %d of NVML is unreachable and omitted", index)
        else:
            devices.append(_info(handle, uuid, index, library))
    return devices


def _info(handle: Any, uuid: str, index: int, library: NvmlLibrary) -> DeviceInfo:
    return DeviceInfo(
        uuid=uuid,
        name=call_or_none(pynvml.nvmlDeviceGetName, handle) or "unknown GPU",
        nvml_index=index,
        memory_total=call_or_none(memory_total, handle),
        driver_version=library.driver,
        mig=is_divided(handle),
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
_UPDATED = "The NVIDIA driver was updated while loaded: restart the machine."
_START_ERRORS = {
    9: "The NVIDIA driver is not loaded.",  # NVML_ERROR_DRIVER_NOT_LOADED
    12: _NO_LIBRARY,  # NVML_ERROR_LIBRARY_NOT_FOUND
}
_REOPEN_S = 30.0
# By pid, because a forked child has to open NVML again, and by reader.
_opened: dict[tuple[int, str], DeviceSource] = {}


def open_source(
    clock: Clock = time.monotonic, *, reader: str = "sampler", reads_activity: bool = True
) -> DeviceSource:
    """Return this process's source, opened on the first call (tens of ms on a GPU machine).

    Each `reader` has a separate source: rates are means since its last reading, and a source is
    not thread-safe. Without a driver it returns a `NullSource`, and retries after 30 s. There is no
    lock, which a fork could leave locked: NVML counts its initializations. `reads_activity`: the
    activity counters of newer GPUs, which other programs may read as well.
    """
    key = os.getpid(), reader
    source = _opened.get(key)
    if source is None or clock() >= source.retry_at:
        source = _opened[key] = _open(clock, reads_activity)
    return source


def _open(clock: Clock, reads_activity: bool) -> DeviceSource:
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        return NullSource(_WRONG_PACKAGE)
    retry_at = clock() + _REOPEN_S
    try:
        pynvml.nvmlInit()
        source = NvmlSource(clock, reads_activity=reads_activity)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return NullSource(_UPDATED)
        reason = _START_ERRORS.get(error.value, f"NVML did not start: {error}.")
        return NullSource(reason, retry_at)
    if not source.devices():
        return NullSource(_NO_GPU, retry_at)
    return source
