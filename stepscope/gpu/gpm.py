"""Read the activity of a GPU's units by NVML's GPM (Hopper and newer): means between two samples.

Reading disturbs other readers, such as a DCGM exporter, so GPM is disabled by default.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import pynvml

from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NOT_BY_GPU, NvmlDevice, driver_errors
from stepscope.gpu.nvml_queries import FASTEST
from stepscope.gpu.nvml_reader import ONE_READING

log = logging.getLogger(__name__)

MIB = 2**20
MIN_INTERVAL_S = 0.1  # Between two samples (nvml.h).

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
"""NVML_GPM_METRIC_* -> metric key and factor to stored units; NVML has percent or MiB/s."""
SHARES = ("gpu/sm_active", "gpu/sm_occupancy", "gpu/tensor_active", "gpu/dram_active")
"""Metrics that only GPM has. For the rates of NVLink byte counters are preferred."""

ONLY_ROOT = (
    "permission: this driver lets only administrators read the activity counters "
    "(its option NVreg_RestrictProfilingToAdminUsers)"
)
NOT_ARMED = "read only while it is shown or recorded"
BEFORE_HOPPER = "not supported on this GPU (Hopper and newer have it)"


class GpmReader:
    """Reads the activity of one GPU or MIG instance; the first failure disables the reader."""

    def __init__(self, gpu: NvmlDevice) -> None:
        self._gpu = gpu
        self._opened = gpu.library.opened
        self._off: str | None = None
        self._query: Any = None
        self._target: tuple[Any, int | None] = (None, None)
        self._buffers: list[Any] = []  # Two samples, written alternately.
        self._sampled_at: float | None = None
        self.given: frozenset[str] = frozenset()  # The metrics of the latest response.

    def read(self) -> dict[str, float]:
        """Return the means since the last call; {} without a sample at least 0.1 s old."""
        if self._off is not None or self._gpu.handle is None:
            return {}
        try:
            if self._query is None:
                self._open()
            values = self._read(self._gpu.library.clock())
        except driver_errors() as error:
            self._off, self.given = _error_reason(error), frozenset()
            log.info("GPM of %s: %s; not read again", self._gpu.uuid, self._off)
            self.close()
            return {}
        if values:
            self.given = frozenset(values)
        return values

    def close(self) -> None:
        """Free the buffers, unless other code has shut NVML down and so freed them."""
        buffers, self._buffers, self._sampled_at = self._buffers, [], None
        if self._opened == self._gpu.library.opened:
            with contextlib.suppress(*driver_errors()):
                for buffer in buffers:
                    pynvml.nvmlGpmSampleFree(buffer)

    def rest(self) -> None:
        """Discard the last sample and `given`, until the next call of `read`."""
        self.given, self._sampled_at = frozenset(), None

    def reasons(self, *, armed: bool) -> dict[str, str]:
        """Return the reasons for missing metrics of SHARES, by key."""
        pending = NOT_BY_GPU if self.given else ONE_READING
        reason = self._off or (pending if armed else NOT_ARMED)
        return {key: reason for key in SHARES if key not in self.given}

    def _open(self) -> None:
        handle, instance = self._gpu.handle, None
        if self._gpu.uuid.startswith("MIG-"):  # the parent has the counters
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
        if self._sampled_at is not None and now - self._sampled_at < MIN_INTERVAL_S:
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
        values: dict[str, float] = {}
        for metric, (key, unit) in zip(query.metrics, METRICS.values(), strict=False):
            value, highest = metric.value * unit, 100.0 if key in SHARES else FASTEST
            # The value of a counter that did not run is NaN.
            plausible = math.isfinite(value) and 0 <= value <= highest
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and plausible:
                values[key] = round(value, 1 if key in SHARES else -3)
        return values


def _error_reason(error: Exception) -> str:
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
