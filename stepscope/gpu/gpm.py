"""What parts of a GPU were active, by NVML's GPM: Hopper and newer, only while somebody wants it.

Two samples of hardware counters, some time apart, give the mean of the time between. Reading them
disturbs other readers of the same counters, such as a DCGM exporter on this machine, so it is off
until it is armed, and stays off after the first failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import Any

import pynvml

from stepscope.gpu.nvml_device import BINDING_ERRORS, NOT_BY_DRIVER, NOT_BY_GPU, Gpu
from stepscope.gpu.nvml_reader import ONE_READING

log = logging.getLogger(__name__)

MIB = 2**20
LEAST_S = 0.1
"""Two samples have to be this far apart (nvml.h)."""

METRICS: dict[int, tuple[str, float]] = {
    2: ("gpu/sm_active", 1.0),
    3: ("gpu/sm_occupancy", 1.0),
    5: ("gpu/tensor_active", 1.0),
    10: ("gpu/dram_active", 1.0),
    20: ("gpu/pcie_tx", MIB),
    21: ("gpu/pcie_rx", MIB),
    60: ("gpu/nvlink_rx", MIB),
    61: ("gpu/nvlink_tx", MIB),
}
"""NVML_GPM_METRIC_* -> metric and its unit; percent, or MiB a second."""
SHARES = ("gpu/sm_active", "gpu/sm_occupancy", "gpu/tensor_active", "gpu/dram_active")
"""What only GPM gives. Rates of NVLink also have byte counters, which go before."""

ONLY_ROOT = (
    "permission: this driver lets only administrators read the activity counters "
    "(its option NVreg_RestrictProfilingToAdminUsers)"
)
NOT_ARMED = "read only while it is shown or recorded"
BEFORE_HOPPER = "not supported on this GPU (Hopper and newer have it)"
FASTEST = 2e12


@dataclass(frozen=True, slots=True)
class Target:
    """Whose counters to read: a GPU, or an instance of the GPU that has `handle`."""

    handle: Any
    instance: int | None = None


class Gpm:
    """Reads the activity of one GPU or MIG instance; two sample buffers take turns.

    Every method raises what pynvml raises.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        support = pynvml.nvmlGpmQueryDeviceSupport(target.handle)
        if not support.isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._buffers: list[Any] = []
        self._question = question = pynvml.c_nvmlGpmMetricsGet_t()  # 23 kB, so made once
        question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(METRICS)
        for metric, number in zip(question.metrics, METRICS, strict=False):
            metric.metricId = number
        self._sampled_at: float | None = None

    def close(self) -> None:
        """Give the buffers back; the next read takes new ones."""
        buffers, self._buffers = self._buffers, []
        self._sampled_at = None
        for buffer in buffers:
            pynvml.nvmlGpmSampleFree(buffer)

    def restart(self) -> None:
        """Forget the last sample: what comes after a break is not told of it."""
        self._sampled_at = None

    def read(self, now: float) -> dict[str, float]:
        """Return the means since the last call, rounded; nothing the first time.

        A call within 0.1 s of the one before returns nothing and takes no sample.
        """
        if self._sampled_at is not None and now - self._sampled_at < LEAST_S:
            return {}
        while len(self._buffers) < 2:
            self._buffers.append(pynvml.nvmlGpmSampleAlloc())
        before, after = self._buffers
        self._sample(before if self._sampled_at is None else after)
        first, self._sampled_at = self._sampled_at is None, now
        if first:
            return {}
        self._buffers = [after, before]
        return self._values(before, after)

    def _sample(self, buffer: Any) -> None:
        if self._target.instance is None:
            pynvml.nvmlGpmSampleGet(self._target.handle, buffer)
        else:
            pynvml.nvmlGpmMigSampleGet(self._target.handle, self._target.instance, buffer)

    def _values(self, before: Any, after: Any) -> dict[str, float]:
        question = self._question
        question.sample1, question.sample2 = before, after
        pynvml.nvmlGpmMetricsGet(question)
        found: dict[str, float] = {}
        for answer, (key, unit) in zip(question.metrics, METRICS.values(), strict=False):
            value = answer.value * unit
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and plausible(key, value):
                found[key] = round(value, 1 if key in SHARES else -3)
        return found


def plausible(key: str, value: float) -> bool:
    """Say whether a value can be real; NaN stands for a counter that did not run."""
    highest = 100.0 if key in SHARES else FASTEST
    return math.isfinite(value) and 0 <= value <= highest


class Activity:
    """The activity of one GPU under a policy: the first failure ends it until the GPU is new.

    `given` are the metrics that the last answer held.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._gpm: Gpm | None = None
        self._opened = gpu.library.opened
        self._off: str | None = None
        self.given: frozenset[str] = frozenset()

    def read(self) -> dict[str, float]:
        """Return the means since the last call, if there is a sample to compare with."""
        if self._off is not None or self._gpu.handle is None:
            return {}
        try:
            if self._gpm is None:
                self._gpm = Gpm(_target(self._gpu.handle, self._gpu.uuid))
                self._opened = self._gpu.library.opened
            values = self._gpm.read(self._gpu.library.clock())
        except pynvml.NVMLError as error:
            return self._turn_off(_why(error))
        except (pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
            return self._turn_off(f"error: {type(error).__name__}: {error}")
        if values:
            self.given = frozenset(values)
        return values

    def close(self) -> None:
        """Give the buffers back, unless they ended with an NVML that other code has shut down."""
        gpm, self._gpm = self._gpm, None
        if gpm is not None and self._opened == self._gpu.library.opened:
            with contextlib.suppress(pynvml.NVMLError, *BINDING_ERRORS):
                gpm.close()

    def rest(self) -> None:
        """Forget the last sample and what was given, until `read` is called again."""
        self.given = frozenset()
        if self._gpm is not None:
            self._gpm.restart()

    def reasons(self, *, armed: bool) -> dict[str, str]:
        """Say why the shares are missing."""
        waiting = NOT_BY_GPU if self.given else ONE_READING
        reason = self._off or (waiting if armed else NOT_ARMED)
        return {key: reason for key in SHARES if key not in self.given}

    def _turn_off(self, reason: str) -> dict[str, float]:
        log.info("GPM of %s: %s; not asked again", self._gpu.uuid, reason)
        self._off, self.given = reason, frozenset()
        self.close()
        return {}


def _target(handle: Any, uuid: str) -> Target:
    if not uuid.startswith("MIG-"):
        return Target(handle)
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return Target(parent, pynvml.nvmlDeviceGetGpuInstanceId(handle))


def _why(error: Any) -> str:
    match error.value:
        case pynvml.NVML_ERROR_NOT_SUPPORTED:
            return BEFORE_HOPPER
        case pynvml.NVML_ERROR_FUNCTION_NOT_FOUND | pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
            return NOT_BY_DRIVER
        case pynvml.NVML_ERROR_NO_PERMISSION:
            return ONLY_ROOT
    return f"error: {error}"
