"""Read the activity of a GPU's units by NVML's GPM (Hopper and newer): means between two samples.

Reading disturbs other readers, such as a DCGM exporter, so it happens only for a page or a run.
"""

from __future__ import annotations

from typing import Any

import pynvml

from stepscope.gpu.nvml_device import NOT_BY_GPU, PERMISSION, NvmlDevice
from stepscope.gpu.nvml_queries import BYTES_PER_SECOND, ONE_READING, PERCENT

MIB = 2**20
MIN_INTERVAL_S = 0.1  # Between two samples (nvml.h).
MAX_INTERVAL_S = 10.0  # A mean over a longer break would be misleading.

METRICS = {
    2: "gpu/sm_active",
    3: "gpu/sm_occupancy",
    5: "gpu/tensor_active",
    10: "gpu/dram_active",
    20: "gpu/pcie_tx",
    21: "gpu/pcie_rx",
    60: "gpu/nvlink_rx",
    61: "gpu/nvlink_tx",
}
"""NVML_GPM_METRIC_* -> metric key; NVML has percent, and MiB/s of links."""
SHARES = ("gpu/sm_active", "gpu/sm_occupancy", "gpu/tensor_active", "gpu/dram_active")
"""Metrics that only GPM has, in percent."""

ONLY_ROOT = (
    "permission: this driver lets only administrators read the activity counters "
    "(its option NVreg_RestrictProfilingToAdminUsers)"
)
BEFORE_HOPPER = "not supported on this GPU (Hopper and newer have it)"
_REASONS = {PERMISSION: ONLY_ROOT, NOT_BY_GPU: BEFORE_HOPPER}


class GpmReader:
    """Reads the activity of one GPU or MIG instance."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        self._calls = (self._sample,)
        self._query: Any = None
        self._buffers: list[Any] = []  # Two samples, written alternately.
        self._initialization = 0
        self._sampled_at: float | None = None
        self.given: frozenset[str] = frozenset()  # The metrics of the latest result.

    def read(self) -> dict[str, float]:
        """Return the means since the last call; {} without a sample at least 0.1 s old."""
        now = self._device.library.clock()
        if self._sampled_at is not None:
            if now - self._sampled_at < MIN_INTERVAL_S:
                return {}
            if now - self._sampled_at > MAX_INTERVAL_S:
                self._sampled_at = None
        values = self._device.query(self._calls)
        if values is None:
            self.given = frozenset()
            self._sampled_at = None
            return {}
        if self._sampled_at is not None:
            self.given = frozenset(values)
        self._sampled_at = now
        return values

    def reasons(self) -> dict[str, str]:
        """Return the reasons for missing metrics of SHARES, by key."""
        reason = self._device.reason(self._calls)
        if reason is not None:
            reason = _REASONS.get(reason, reason)
        else:
            reason = NOT_BY_GPU if self.given else ONE_READING
        return {key: reason for key in SHARES if key not in self.given}

    def _sample(self, handle: Any) -> dict[str, float]:
        """Take a sample; return the means since the one before, {} without. Raises NVMLError."""
        instance = None
        if self._device.uuid.startswith("MIG-"):  # the parent has the counters
            instance = pynvml.nvmlDeviceGetGpuInstanceId(handle)
            handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        if self._initialization != self._device.library.initializations:
            self._allocate(handle)
        before, after = self._buffers
        if instance is None:
            pynvml.nvmlGpmSampleGet(handle, after)
        else:
            pynvml.nvmlGpmMigSampleGet(handle, instance, after)
        self._buffers = [after, before]
        if self._sampled_at is None:
            return {}
        query = self._query
        query.sample1 = before
        query.sample2 = after
        pynvml.nvmlGpmMetricsGet(query)
        values: dict[str, float] = {}
        for metric, key in zip(query.metrics, METRICS.values(), strict=False):
            is_share = key in SHARES
            value = metric.value if is_share else metric.value * MIB
            low, high = PERCENT if is_share else BYTES_PER_SECOND
            # The value of a counter that did not run is NaN, which is in no range.
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and low <= value <= high:
                values[key] = round(value, 1 if is_share else -3)
        return values

    def _allocate(self, handle: Any) -> None:
        """Allocate the buffers. A shutdown by other code has freed the earlier ones."""
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        query = pynvml.c_nvmlGpmMetricsGet_t()  # 23 kB, so made once
        query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(METRICS)
        for metric, number in zip(query.metrics, METRICS, strict=False):
            metric.metricId = number
        self._query = query
        self._buffers = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._initialization = self._device.library.initializations
