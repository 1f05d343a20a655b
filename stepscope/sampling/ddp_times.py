"""What DistributedDataParallel itself measures of a step: computing told apart from waiting.

DDP times every k-th iteration for its own log (`torch/csrc/distributed/c10d/logger.cpp`): when its
forward began, when backward() began, when the last gradient was ready and when all were averaged.
From outside, backward() takes equally long on all ranks, because each waits for the slowest; here
its computing is known apart. The interface is private and looked for with care.

Cost: on a CPU the clocks are read either way, and one reading of the log takes 4 µs, 20 µs between
steps that compute. On CUDA DDP waits, when the next forward begins, for the sampled backward of the
iteration before, so iterations are sampled seldom there (by default DDP does it every 100).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

DDP_METRICS = "perf/forward_compute, perf/backward_compute and perf/comm_wait"
"""What is missing where its log cannot be read."""
READ_EVERY_S = 0.035
"""Least time between two readings on a CPU: they cost 0.1 % of a step at most."""
READ_EVERY_CUDA_S = 0.2
LEAST_CUDA, MOST_CUDA = 16, 64
"""Iterations from one sampled one to the next on CUDA, where each costs a wait for the device."""
MOST_CPU = 256
FIRST = 12
"""Steps before the first reading: DDP rebuilds its buckets, and the step time is not known."""
JUDGE_EVERY = 256
"""Steps after which the distance of samples is chosen anew, by the step time that there is now."""


class DdpTimes:
    """Reads the log of this process's DistributedDataParallel; used by the training thread alone.

    Iterations are sampled where their number is a multiple of a power of two, so that all ranks
    sample the same ones. Values belong to the iteration before the one that has just ended: DDP
    writes them when the next forward begins. Raises whatever torch raises.
    """

    def __init__(self) -> None:
        self._module: weakref.ref[Any] | None = None
        self._on_cuda = False
        self._every = 0
        self._steps = 0
        self._next = FIRST
        self._judged = (0, 0.0)
        """Steps and clock when the distance was chosen last."""
        self._iteration = -1

    def meet(self, module: Any) -> None:
        """Read this DistributedDataParallel from now on; a later one takes its place."""
        self._module = weakref.ref(module)
        self._on_cuda = bool(next(module.parameters()).is_cuda)
        self._every, self._next = 0, self._steps + FIRST
        self._judged = (self._steps, 0.0)
        self._iteration = -1

    def add(self, row: dict[str, Any], now_s: float) -> None:
        """Count a step that ended at `now_s`, and add what was sampled, in seconds."""
        self._steps += 1
        if self._steps < self._next or self._module is None:
            if not self._judged[1] and self._steps > self._judged[0] + 1:
                self._judged = (self._steps, now_s)  # the first step takes long
            return
        module = self._module()
        if module is None:
            self._module = None
            return
        if not self._every or self._steps - self._judged[0] >= JUDGE_EVERY:
            self._choose(module, now_s)
            return
        log: Mapping[str, int] = module.logger._get_ddp_logging_data().ints_map
        iteration = log.get("iteration", -1)
        self._next = self._steps + self._every - iteration % self._every
        if iteration != self._iteration and iteration % self._every == 0:
            self._iteration = iteration
            row.update(seconds(log))

    def _choose(self, module: Any, now_s: float) -> None:
        """Choose how far apart samples lie, by the step time since the last choice."""
        steps, began_s = self._judged
        self._judged = (self._steps, now_s)
        step_s = max((now_s - began_s) / max(1, self._steps - steps), 1e-6)
        every = distance(step_s, on_cuda=self._on_cuda)
        if every != self._every:
            self._every = every
            module._set_ddp_runtime_logging_sample_rate(every)
        self._next = self._steps + 1


def distance(step_s: float, *, on_cuda: bool) -> int:
    """Return the iterations from one sample to the next, a power of two.

    >>> [distance(step_s, on_cuda=False) for step_s in (0.0005, 0.01, 0.2)]
    [128, 4, 1]
    """
    least, most, wanted_s = (
        (LEAST_CUDA, MOST_CUDA, READ_EVERY_CUDA_S) if on_cuda else (1, MOST_CPU, READ_EVERY_S)
    )
    every = least
    while every < most and every * step_s < wanted_s:
        every *= 2
    return every


def seconds(log: Mapping[str, int]) -> dict[str, float]:
    """Return the times of one iteration from DDP's log, by metric; what is 0 there is missing."""
    forward, backward, communication = (
        log.get(f"{name}_time", 0)
        for name in ("forward_compute", "backward_compute", "backward_comm")
    )
    found = {}
    if forward > 0:
        found["perf/forward_compute"] = forward / 1e9
    if backward > 0:
        found["perf/backward_compute"] = backward / 1e9
    if communication > 0:
        # Averaging begins with the first bucket, beside backward: what is over is waiting.
        hidden = log.get("backward_compute_comm_overlap_time", 0)
        found["perf/comm_wait"] = max(0, communication - hidden) / 1e9
    return found
