"""What parts of a GPU were active, by NVML's GPM (Hopper and newer).

Two samples of hardware counters give the mean of the time between. Reading them disturbs other
readers, such as a DCGM exporter, so it is off until it is armed, and after the first failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import pynvml

from stepscope.gpu.nvml_device import (
    BINDING_ERRORS,
    NOT_BY_DRIVER,
    NOT_BY_GPU,
    NvmlDevice,
    driver_errors,
)
from stepscope.gpu.nvml_queries import FASTEST
from stepscope.gpu.nvml_reader import ONE_READING

log = logging.getLogger(__name__)

MIB = 2**20
LEAST_S = 0.1  # two samples have to be this far apart (nvml.h)

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
"""What only GPM gives. Byte counters also give the rates of NVLink, and are preferred."""

ONLY_ROOT = (
    "permission: this driver lets only administrators read the activity counters "
    "(its option NVreg_RestrictProfilingToAdminUsers)"
)
NOT_ARMED = "read only while it is shown or recorded"
BEFORE_HOPPER = "not supported on this GPU (Hopper and newer have it)"


class GpmReader:
    """The activity of one GPU or MIG instance; the first failure ends it until the GPU is new.

    Two sample buffers take turns. `given` are the metrics that the last answer held.
    """

    def __init__(self, gpu: NvmlDevice) -> None:
        self._gpu = gpu
        self._opened = gpu.library.opened
        self._off: str | None = None
        self._query: Any = None
        self._target: tuple[Any, int | None] = (None, None)
        self._buffers: list[Any] = []
        self._sampled_at: float | None = None
        self.given: frozenset[str] = frozenset()

    def read(self) -> dict[str, float]:
        """Return the means since the last call; {} without a sample 0.1 s ago or earlier."""
        if self._off is not None or self._gpu.handle is None:
            return {}
        try:
            if self._query is None:
                self._open()
            values = self._read(self._gpu.library.clock())
        except driver_errors() as error:
            self._off, self.given = _why(error), frozenset()
            log.info("GPM of %s: %s; not asked again", self._gpu.uuid, self._off)
            self.close()
            return {}
        if values:
            self.given = frozenset(values)
        return values

    def close(self) -> None:
        """Free the buffers, unless they ended with an NVML that other code has shut down."""
        buffers, self._buffers, self._sampled_at = self._buffers, [], None
        if self._opened == self._gpu.library.opened:
            with contextlib.suppress(pynvml.NVMLError, *BINDING_ERRORS):
                for buffer in buffers:
                    pynvml.nvmlGpmSampleFree(buffer)

    def rest(self) -> None:
        """Forget the last sample and what was given, until `read` is called again."""
        self.given, self._sampled_at = frozenset(), None

    def reasons(self, *, armed: bool) -> dict[str, str]:
        """Return why the shares are missing."""
        waiting = NOT_BY_GPU if self.given else ONE_READING
        reason = self._off or (waiting if armed else NOT_ARMED)
        return {key: reason for key in SHARES if key not in self.given}

    def _open(self) -> None:
        handle, instance = self._gpu.handle, None
        if self._gpu.uuid.startswith("MIG-"):  # its parent has the counters
            instance = pynvml.nvmlDeviceGetGpuInstanceId(handle)
            handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        query = pynvml.c_nvmlGpmMetricsGet_t()  # 23 kB, so made once
        query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        for metric, number in zip(query.metrics, METRICS, strict=False):
            metric.metricId = number
        self._target, self._query = (handle, instance), query
        self._opened = self._gpu.library.opened

    def _read(self, now: float) -> dict[str, float]:
        if self._sampled_at is not None and now - self._sampled_at < LEAST_S:
            return {}
        while len(self._buffers) < 2:
            self._buffers.append(pynvml.nvmlGpmSampleAlloc())
        before, after = self._buffers
        first, self._sampled_at = self._sampled_at is None, now
        handle, instance = self._target
        buffer = before if first else after
        if instance is None:
            pynvml.nvmlGpmSampleGet(handle, buffer)
        else:
            pynvml.nvmlGpmMigSampleGet(handle, instance, buffer)
        if first:
            return {}
        self._buffers = [after, before]
        query = self._query
        query.sample1, query.sample2 = before, after
        pynvml.nvmlGpmMetricsGet(query)
        found: dict[str, float] = {}
        for answer, (key, unit) in zip(query.metrics, METRICS.values(), strict=False):
            value, highest = answer.value * unit, 100.0 if key in SHARES else FASTEST
            # NaN stands for a counter that did not run.
            plausible = math.isfinite(value) and 0 <= value <= highest
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and plausible:
                found[key] = round(value, 1 if key in SHARES else -3)
        return found


def _why(error: Exception) -> str:
    if not isinstance(error, pynvml.NVMLError):
        return f"error: {type(error).__name__}: {error}"
    match error.value:
        case pynvml.NVML_ERROR_NOT_SUPPORTED:
            return BEFORE_HOPPER
        case pynvml.NVML_ERROR_FUNCTION_NOT_FOUND | pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
            return NOT_BY_DRIVER
        case pynvml.NVML_ERROR_NO_PERMISSION:
            return ONLY_ROOT
    return f"error: {error}"
