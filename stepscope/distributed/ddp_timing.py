"""Read DistributedDataParallel's own times of a step: computation and exposed communication.

DDP times every k-th iteration for its log (`torch/csrc/distributed/c10d/logger.cpp`), a private
interface: the start of forward and of backward(), the last ready gradient and the end of the
gradient all-reduce. From outside, backward() takes equally long on all ranks, because each waits
for the slowest.

Reading the log takes 4 µs, and 20 µs between steps that compute; on a CPU DDP reads the clocks
either way. On CUDA DDP waits, when the next forward begins, for the sampled backward of the
iteration before, so iterations are sampled rarely there (by default DDP does it every 100).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

DDP_METRICS = "perf/forward_compute, perf/backward_compute and perf/comm_wait"
"""Metrics that are missing if the log cannot be read."""
SAMPLE_EVERY_S, SAMPLE_EVERY_CUDA_S = 0.035, 0.2  # Minimum time between two samples.
MAX_CPU = 243
LEAST_CUDA, MOST_CUDA = 17, 153  # Bounds, in iterations: each sample waits for the device.
GROWTH = 3
"""Distances are powers of it. Work that a script does every 4, 10 or 64 steps then falls on samples
as often as on other steps, and ranks with different distances have common samples."""
FIRST = 10  # Steps before the first sample: DDP rebuilds its buckets, and the step time is unknown.
ADJUST_EVERY = 256  # Steps after which the distance is adjusted to the present step time.


class DdpTiming:
    """Reader of the log of this process's DistributedDataParallel. Training thread only.

    Samples are the iterations divisible by the distance, a power of three (times 17 on CUDA), so
    that all ranks sample the same ones. A sample is recorded when the log has changed since the
    step before. It belongs to the iteration before the latest one, because DDP writes it when the
    next forward begins. Raises whatever torch raises.
    """

    def __init__(self) -> None:
        self._module: weakref.ref[Any] | None = None
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()  # All that exist.
        self._steps = self._every = 0
        self._adjusted_s: float | None = None
        self._iteration = -1
        self._on_cuda = False

    def attach(self, module: Any) -> None:
        """Read this DistributedDataParallel from now on, instead of a former one."""
        self._module = weakref.ref(module)
        self._modules.add(module)
        self._steps = self._every = 0
        self._adjusted_s = None
        self._on_cuda = bool(next(module.parameters()).is_cuda)

    def add(self, row: dict[str, Any], now_s: float) -> None:
        """Count a step that ended at `now_s`, and add sampled times in seconds to its row."""
        module = None if self._module is None else self._module()
        if module is None:
            return
        if self._adjusted_s is None:  # the first step takes long
            self._adjusted_s = now_s
            return
        self._steps += 1
        log = _log_of(module)
        before, self._iteration = self._iteration, log.get("iteration", -1)
        is_sample = self._every and self._iteration > before and not self._iteration % self._every
        if (models := len(self._modules)) > 1:
            row["perf/ddp_models"] = float(models)
        elif is_sample:
            times = seconds(log)
            if "perf/comm_wait" in times:
                row |= times | {"perf/ddp_iteration": float(self._iteration)}
        if self._steps >= (ADJUST_EVERY if self._every else FIRST):
            step_s = (now_s - self._adjusted_s) / self._steps
            self._steps, self._adjusted_s = 0, now_s
            if (every := distance(step_s, on_cuda=self._on_cuda)) != self._every:
                self._every = every
                module._set_ddp_runtime_logging_sample_rate(every)


def distance(step_s: float, *, on_cuda: bool) -> int:
    """Return the iterations from one sample to the next.

    >>> [distance(step_s, on_cuda=False) for step_s in (0.0005, 0.01, 0.2)]
    [81, 9, 1]
    """
    every, most, wanted_s = (
        (LEAST_CUDA, MOST_CUDA, SAMPLE_EVERY_CUDA_S) if on_cuda else (1, MAX_CPU, SAMPLE_EVERY_S)
    )
    while every < most and every * step_s < wanted_s:
        every *= GROWTH
    return every


def _log_of(module: Any) -> Mapping[str, int]:
    log: Mapping[str, int] = module.logger._get_ddp_logging_data().ints_map
    return log


def seconds(log: Mapping[str, int]) -> dict[str, float]:
    """Return the times of one iteration from DDP's log by metric, without those that are 0."""
    # The all-reduce begins with the first bucket, during backward: the rest is exposed.
    overlap_ns = log.get("backward_compute_comm_overlap_time", 0)
    names = {
        "perf/forward_compute": ("forward_compute_time", 0),
        "perf/backward_compute": ("backward_compute_time", 0),
        "perf/comm_wait": ("backward_comm_time", overlap_ns),
    }
    return {
        key: max(0, log[name] - hidden) / 1e9
        for key, (name, hidden) in names.items()
        if log.get(name, 0) > 0
    }
