"""Read what DistributedDataParallel measures of a step: computing apart from waiting.

DDP times every k-th iteration for its own log (`torch/csrc/distributed/c10d/logger.cpp`): when its
forward began, when backward() began, when the last gradient was ready and when all were averaged.
From outside, backward() takes equally long on all ranks, because each waits for the slowest. The
interface is private.

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
"""Least time between two samples on a CPU: reading them costs 0.2 % of a step at most."""
READ_EVERY_CUDA_S = 0.2
LEAST_CUDA, MOST_CUDA = 17, 153
"""Iterations from one sampled one to the next on CUDA, where each costs a wait for the device."""
MOST_CPU = 243
GROWTH = 3
"""Distances are powers of it: what a script does every 4, 10 or 64 steps falls on samples as often
as on other steps, and the samples of ranks that chose differently have some in common."""
FIRST = 10
"""Steps before the first reading: DDP rebuilds its buckets, and the step time is not known."""
JUDGE_EVERY = 256
"""Steps after which the distance of samples is chosen anew, by the step time that there is now."""

PACE_OVER = 32  # Least steps over which the iterations of a step are counted.


class DdpTiming:
    """Reads the log of this process's DistributedDataParallel; used by the training thread alone.

    Iterations are sampled where their number is a multiple of the distance, which is a power of
    three (times 17 on CUDA), so that all ranks sample the same ones. A sample is recorded where the
    log has changed since the step before: it is that of the iteration before the one that has just
    ended, because DDP writes it when the next forward begins. Raises whatever torch raises.
    """

    def __init__(self) -> None:
        self._module: weakref.ref[Any] | None = None
        self._others: list[tuple[weakref.ref[Any], int, bool]] = []
        """Modules met before, the iteration of each when it was looked at last, and whether it was
        trained since another one was met."""
        self._models = 1
        self._steps = 0
        self._forget()

    def meet(self, module: Any) -> None:
        """Read this DistributedDataParallel from now on; a later one takes its place."""
        former = None if self._module is None else self._module()
        if former is not None:
            self._others.append((weakref.ref(former), _log_of(former).get("iteration", -1), False))
        self._module = weakref.ref(module)
        self._forget()
        self._on_cuda = bool(next(module.parameters()).is_cuda)

    def _forget(self) -> None:
        """Begin with a module of which nothing is known."""
        self._on_cuda = False
        self._every, self._next = 0, self._steps + FIRST
        self._judged = (self._steps, 0.0)
        """Steps and clock when the distance was chosen last."""
        self._read = (0, 0)
        """Steps and iteration of the last reading."""
        self._paced: tuple[int, int] | None = None
        """The same of the reading since which the iterations of a step are counted."""
        self._per_step = 1
        """Iterations of a step: several where each of its batches is averaged."""

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
        log = _log_of(module)
        iteration = log.get("iteration", -1)
        (read_at, before), self._read = self._read, (self._steps, iteration)
        is_new = read_at == self._steps - 1 and iteration > before
        if self._models > 1:
            row["perf/ddp_models"] = float(self._models)
        elif is_new and self._every and iteration % self._every == 0:
            found = seconds(log)
            if "perf/comm_wait" in found:
                row.update(found)
                row["perf/ddp_iteration"] = float(iteration)
        if is_new:
            self._count(iteration)
        if not self._every or self._steps - self._judged[0] >= JUDGE_EVERY:
            self._choose(module, now_s)
        self._next = self._steps + (self._quiet_steps(iteration) if is_new else 1)

    def _count(self, iteration: int) -> None:
        """Count the iterations of a step, between two readings with a new one."""
        began = self._paced or (self._steps, iteration)
        steps = self._steps - began[0]
        if steps >= PACE_OVER:
            self._per_step = max(1, round((iteration - began[1]) / steps))
        if not 0 < steps < PACE_OVER:
            self._paced = (self._steps, iteration)

    def _quiet_steps(self, iteration: int) -> int:
        """Return the steps until the log is read again: one before its next sample appears."""
        left = self._every - iteration % self._every
        return max(1, left // self._per_step - 1)

    def _choose(self, module: Any, now_s: float) -> None:
        """Choose how far apart samples lie, by the step time since the last choice."""
        steps, began_s = self._judged
        self._judged = (self._steps, now_s)
        step_s = max((now_s - began_s) / max(1, self._steps - steps), 1e-6)
        every = distance(step_s, on_cuda=self._on_cuda, per_step=self._per_step)
        if every != self._every:
            self._every = every
            module._set_ddp_runtime_logging_sample_rate(every)
        self._count_models()

    def _count_models(self) -> None:
        """Count the modules that are trained; one that is done with no longer gets ahead."""
        kept = []
        for ref, before, trains in self._others:
            module = ref()
            if module is not None:
                iteration = _log_of(module).get("iteration", -1)
                kept.append((ref, iteration, trains or iteration > before))
        self._others = kept
        self._models = 1 + sum(trains for _, _, trains in kept)


def distance(step_s: float, *, on_cuda: bool, per_step: int = 1) -> int:
    """Return the iterations from one sample to the next; `per_step` are those of a step.

    >>> [distance(step_s, on_cuda=False) for step_s in (0.0005, 0.01, 0.2)]
    [81, 9, 1]
    """
    every, most, wanted_s = (
        (LEAST_CUDA, MOST_CUDA, READ_EVERY_CUDA_S) if on_cuda else (1, MOST_CPU, READ_EVERY_S)
    )
    # At least those of a step, so that it is not always the same one of them.
    while every < most and (every * step_s < wanted_s * per_step or every < per_step):
        every *= GROWTH
    return every


def _log_of(module: Any) -> Mapping[str, int]:
    log: Mapping[str, int] = module.logger._get_ddp_logging_data().ints_map
    return log


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
