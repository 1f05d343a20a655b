"""Open NVML, the driver's interface to NVIDIA GPUs."""

from __future__ import annotations

import math
import os
import time
from typing import Protocol

import pynvml

from stepscope.gpu.device_info import DeviceInfo, DeviceProperties
from stepscope.gpu.nvml_device import Clock
from stepscope.gpu.nvml_queries import SamplingTier
from stepscope.gpu.nvml_source import NvmlSource
from stepscope.gpu.processes import GpuProcess


class DeviceSource(Protocol):
    """A source of GPU values. Not thread-safe. The default bodies are for no GPU."""

    reason: str | None  # Reason for missing GPUs; None if there are GPUs.

    def devices(self) -> list[DeviceInfo]:
        """Return the GPUs in NVML's order."""
        return []

    def instances(self, uuid: str) -> list[DeviceInfo]:
        """Return the MIG instances of a GPU."""
        return []

    def facts(self, uuid: str) -> DeviceProperties | None:
        """Return the properties of a GPU or an instance; None if it is unreachable."""
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
        return None  # noqa: RET501 - without a body it would be abstract

    def reasons(self, uuid: str) -> dict[str, str]:
        """Return the reasons for missing metrics of this GPU, or missing "processes", by key."""
        return {}

    def lost(self, uuid: str) -> str | None:
        """Return the reason why this GPU is unreachable; None while it is reachable."""
        return None


class NullSource(DeviceSource):
    """A source without GPUs: `reason` is a sentence, `retry_at` the time of the next attempt."""

    def __init__(self, reason: str, retry_at: float = math.inf) -> None:
        self.reason: str | None = reason
        self.retry_at = retry_at


def nvml_uuid(uuid: str, name: str) -> str:
    """Return NVML's UUID of a CUDA device; torch omits the prefix.

    CUDA's name of an instance has its GPU and profile: "NVIDIA H200 MIG 1g.18gb".
    """
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    return f"MIG-{uuid}" if " MIG " in name else f"GPU-{uuid}"


def is_simulated(uuid: str) -> bool:
    """Return True for a GPU of the simulator, by its reserved UUID (simulator/src/shared.h)."""
    return uuid[4:].startswith("c0da5130-0000-4000-8000-0000000000")


_NO_LIBRARY = (
    "No NVIDIA driver library (libnvidia-ml.so.1) was found; in a container, "
    "ask for the driver capability 'utility'."
)
_NO_GPU = "The NVIDIA driver reports no GPU."
WITHOUT_GPU = frozenset({_NO_LIBRARY, _NO_GPU})
"""Reasons of a machine that need not have a GPU; all others are failures."""
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
    if source is None or (isinstance(source, NullSource) and clock() >= source.retry_at):
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
