"""Read DistributedDataParallel's own times of a step: computation and exposed communication.

DDP times every k-th iteration for its log (`torch/csrc/distributed/c10d/logger.cpp`): the start of
forward and of backward(), the last ready gradient and the end of the gradient all-reduce. From
outside, backward() takes equally long on all ranks, because each waits for the slowest. The
interface is private.

Cost: on a CPU the clocks are read either way, and reading the log takes 4 µs, 20 µs between steps
that compute. On CUDA DDP waits, when the next forward begins, for the sampled backward of the
iteration before, so iterations are sampled rarely there (by default DDP does it every 100).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

DDP_METRICS = "perf/forward_compute, perf/backward_compute and perf/comm_wait"
"""Metrics that are missing if the log cannot be read."""
READ_EVERY_S = 0.035
"""Minimum time between two samples on a CPU: reading them takes at most 0.2% of a step."""
READ_EVERY_CUDA_S = 0.2
LEAST_CUDA, MOST_CUDA = 17, 153
"""Bounds of the distance of samples on CUDA, in iterations: each sample waits for the device."""
MOST_CPU = 243
GROWTH = 3
"""Distances are powers of it. Work that a script does every 4, 10 or 64 steps then falls on samples
as often as on other steps, and ranks with different distances have common samples."""
FIRST = 10
"""Steps before the first reading: DDP rebuilds its buckets, and the step time is unknown."""
JUDGE_EVERY = 256
"""Steps after which the distance of samples is adjusted to the present step time."""
PACE_OVER = 32  # Minimum number of steps over which the iterations per step are counted.


class DdpTiming:
    """Reader of the log of this process's DistributedDataParallel. Training thread only.

    Samples are the iterations divisible by the distance, which is a power of three (times 17 on
    CUDA), so that all ranks sample the same ones. A sample is recorded when the log has changed
    since the step before. It belongs to the iteration before the latest one, because DDP writes it
    when the next forward begins. Raises whatever torch raises.
    """

    def __init__(self) -> None:
        self._module: weakref.ref[Any] | None = None
        self._others: list[tuple[weakref.ref[Any], int, bool]] = []
        """Former modules, the iteration of each at its latest reading, and whether it was trained
        since a later module came."""
        self._models = 1
        self._steps = 0
        self._reset()

    def meet(self, module: Any) -> None:
        """Read this DistributedDataParallel from now on, instead of a former one."""
        former = None if self._module is None else self._module()
        if former is not None:
            self._others.append((weakref.ref(former), _log_of(former).get("iteration", -1), False))
        self._module = weakref.ref(module)
        self._reset()
        self._on_cuda = bool(next(module.parameters()).is_cuda)

    def _reset(self) -> None:
        self._on_cuda = False
        self._every, self._next = 0, self._steps + FIRST
        self._judged = (self._steps, 0.0)
        """Step and time of the latest choice of the distance."""
        self._read = (0, 0)
        """Step and iteration of the latest reading."""
        self._paced: tuple[int, int] | None = None
        """Step and iteration of the reading since which iterations are counted."""
        self._per_step = 1
        """Iterations per step: several if the gradients of each of its batches are reduced."""
        self._misses = 0
        """Readings since the log has changed."""

    def add(self, row: dict[str, Any], now_s: float) -> None:
        """Count a step that ended at `now_s`, and add sampled times in seconds to its row."""
        self._steps += 1
        if self._steps < self._next or self._module is None:
            if not self._judged[1] and self._steps > self._judged[0] + 1:
                self._judged = (self._steps, now_s)  # the first step takes long
            return
        module = self._module()
        if module is None:
            self._module = None
            return
        log = _log_of(module)
        iteration = log.get("iteration", -1)
        (read_at, before), self._read = self._read, (self._steps, iteration)
        self._misses = 0 if iteration > before else self._misses + 1
        is_new = read_at == self._steps - 1 and not self._misses
        if self._models > 1:
            row["perf/ddp_models"] = float(self._models)
        elif is_new and self._every and iteration % self._every == 0:
            times = seconds(log)
            if "perf/comm_wait" in times:
                row |= times | {"perf/ddp_iteration": float(iteration)}
        if is_new:
            self._count_iterations(iteration)
        if not self._every or self._steps - self._judged[0] >= JUDGE_EVERY:
            self._choose_distance(module, now_s)
        self._next = self._steps + self._pause(iteration if is_new else None)

    def _pause(self, sample: int | None) -> int:
        """Return the steps until the next reading, one before the next sample appears.

        Without a sample now, each step is read, because a sample needs readings in two consecutive
        steps. A module whose log has not changed for ten distances is idle: the pause doubles.
        """
        if sample is None:
            idle = min(16, max(0, self._misses - 10 * self._every - FIRST))
            return min(1 << idle, 2 * self._every)
        return max(1, (self._every - sample % self._every) // self._per_step - 1)

    def _count_iterations(self, iteration: int) -> None:
        """Update the iterations per step, from two readings with a sample."""
        began = self._paced or (self._steps, iteration)
        steps = self._steps - began[0]
        if steps >= PACE_OVER:
            self._per_step = max(1, round((iteration - began[1]) / steps))
        if not 0 < steps < PACE_OVER:
            self._paced = (self._steps, iteration)

    def _choose_distance(self, module: Any, now_s: float) -> None:
        """Set the distance of samples by the step time since the last choice; count the models."""
        steps, began_s = self._judged
        self._judged = (self._steps, now_s)
        step_s = max((now_s - began_s) / max(1, self._steps - steps), 1e-6)
        every = distance(step_s, on_cuda=self._on_cuda, per_step=self._per_step)
        if every != self._every:
            self._every = every
            module._set_ddp_runtime_logging_sample_rate(every)
        kept = []
        for ref, before, trains in self._others:
            if (other := ref()) is not None:
                iteration = _log_of(other).get("iteration", -1)
                kept.append((ref, iteration, trains or iteration > before))
        self._others = kept
        self._models = 1 + sum(trains for _, _, trains in kept)


def distance(step_s: float, *, on_cuda: bool, per_step: int = 1) -> int:
    """Return the iterations from one sample to the next; `per_step` is their number per step.

    >>> [distance(step_s, on_cuda=False) for step_s in (0.0005, 0.01, 0.2)]
    [81, 9, 1]
    """
    every, most, wanted_s = (
        (LEAST_CUDA, MOST_CUDA, READ_EVERY_CUDA_S) if on_cuda else (1, MOST_CPU, READ_EVERY_S)
    )
    # At least `per_step`: otherwise it would always be the same iteration of a step.
    while every < most and (every * step_s < wanted_s * per_step or every < per_step):
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
