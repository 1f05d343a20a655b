"""Read the GPUs of an initialized NVML: values, properties, processes and MIG instances by UUID.

Values that the driver does not report are omitted; `reasons()` returns the reasons.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from stepscope.gpu.device_info import DeviceInfo, DeviceProperties, describe, parent_uuid
from stepscope.gpu.gpm import GpmReader
from stepscope.gpu.nvml_device import Clock, NvmlDevice, NvmlLibrary, static
from stepscope.gpu.nvml_queries import FIELDS, SamplingTier, field_number, memory_total
from stepscope.gpu.nvml_reader import NvmlReader
from stepscope.gpu.processes import GpuProcess, GpuProcessList, ProcessInfoCache

log = logging.getLogger(__name__)

PCIE = {"gpu/pcie_tx", "gpu/pcie_rx"}
"""Rates that GPM reads faster: the byte counters take 0.5 ms, ten times a second (docs/gpu)."""
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


class NvmlSource:
    """The DeviceSource that reads GPUs and MIG instances through an initialized NVML.

    Never shuts NVML down: some drivers fail after repeated initializations, and a broken GPU can
    block the call.
    """

    reason: str | None = None

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._library = NvmlLibrary(clock)
        self._infos = _list_devices(self._library)
        self._names = ProcessInfoCache(clock=clock)
        self._gpus: dict[str, NvmlDevice] = {}
        self._known: dict[str, _Known] = {}
        self._facts: dict[str, DeviceProperties] = {}
        self._armed = 0

    def devices(self) -> list[DeviceInfo]:
        """Return the GPUs found at initialization, in NVML's order (not CUDA's)."""
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
        """Return the reasons for missing values: of queries so far, or of all for a lost GPU.

        Keys are metrics, and "processes" for the result of `processes`.
        """
        gpu, known = self._gpus.get(uuid), self._known.get(uuid)
        if gpu is not None and gpu.lost is not None:
            return dict.fromkeys((key for entry in FIELDS for key in entry.keys), gpu.lost)
        if known is None:
            return {}
        reasons = known.values.reasons() | known.processes.reasons()
        reasons |= known.activity.reasons(armed=self._armed > 0)
        return {key: text for key, text in reasons.items() if key not in known.activity.given}

    def lost(self, uuid: str) -> str | None:
        return self._gpus[uuid].lost if uuid in self._gpus else None

    def facts(self, uuid: str) -> DeviceProperties | None:
        """Return the properties of a GPU or instance, the last ones if lost; None if unknown."""
        known = self._find(uuid)
        if known is None:
            return self._facts.get(uuid)
        info = self._info(uuid) or _instance_info(known.gpu, self._infos, self._library)
        self._facts[uuid] = facts = describe(known.gpu.handle, info)
        return facts

    def instances(self, uuid: str) -> list[DeviceInfo]:
        """Return the MIG instances of a GPU, which support `read`, `facts` and `processes`."""
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


def _instance_info(gpu: NvmlDevice, infos: list[DeviceInfo], library: NvmlLibrary) -> DeviceInfo:
    """Describe a device that is not listed: an instance, with the index of its parent."""
    uuid = parent_uuid(gpu.handle)
    index = next((info.nvml_index for info in infos if info.uuid == uuid), -1)
    return _described(gpu.handle, gpu.uuid, index, library)
