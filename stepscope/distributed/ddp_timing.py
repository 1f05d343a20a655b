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
LEAST_CUDA, MOST_CUDA = 17, 153
"""Iterations from one sampled one to the next on CUDA, where each costs a wait for the device."""
MOST_CPU = 243
GROWTH = 3
"""Distances are powers of it: what a script does every 4, 10 or 64 steps falls on samples as often
as on other steps, and the samples of ranks that chose differently have some in common."""
FIRST = 10
"""Steps before the first reading: DDP rebuilds its buckets, and the step time is not known. DDP
logs each of its first ten iterations, so the tenth step still shows which iteration it is."""
BY_ITSELF = 100
"""Distance of DDP's own samples, until another is chosen."""
JUDGE_EVERY = 256
"""Steps after which the distance of samples is chosen anew, by the step time that there is now."""
PACE_OVER = 4
"""Distances over which the iterations of a step are counted."""
NOTHING_KNOWN = (1, 0)


class DdpTiming:
    """Reads the log of this process's DistributedDataParallel; used by the training thread alone.

    Iterations are sampled where their number is a multiple of the distance, which is a power of
    three (times 17 on CUDA), so that all ranks sample the same ones. Values belong to the iteration
    before the one that has just ended: DDP writes them when the next forward begins. It does not
    say which iteration runs now. That is how far it is `ahead` of the steps, which each reading
    narrows down; nothing is recorded until it is known. Raises whatever torch raises.
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
            self._others.append((weakref.ref(former), logged_iteration(former), False))
        self._module = weakref.ref(module)
        self._forget()
        self._on_cuda = bool(next(module.parameters()).is_cuda)

    def _forget(self) -> None:
        """Begin with a module of which nothing is known."""
        self._on_cuda = False
        self._every, self._next = 0, self._steps + FIRST
        self._judged = (self._steps, 0.0)
        """Steps and clock when the distance was chosen last."""
        self._iteration = -1
        """What the log showed last."""
        self._former = 0
        """What it showed when the distance was changed last: not sampled at this one."""
        self._ahead = NOTHING_KNOWN
        """The least and the most of the logged iteration less the steps, if it is logged at once.
        A step of several iterations counts as so many."""
        self._per_step = 1
        self._paced: tuple[int, int] | None = None
        """Steps and iteration since which the iterations of a step are counted."""
        self._doubt = False
        """Whether to look once for iterations that went unnoticed."""

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
        log: Mapping[str, int] = module.logger._get_ddp_logging_data().ints_map
        iteration = log.get("iteration", -1)
        if self._models > 1:
            row["perf/ddp_models"] = float(self._models)
        elif self._is_due(iteration):
            found = seconds(log)
            if "perf/comm_wait" in found:
                row.update(found)
                row["perf/ddp_iteration"] = float(iteration)
        is_other = self._place(iteration)
        self._iteration = iteration
        if not self._every or is_other or self._steps - self._judged[0] >= JUDGE_EVERY:
            self._choose(module, iteration, now_s)
        self._next = self._due()

    def _is_due(self, iteration: int) -> bool:
        """Say whether this is the log of the iteration before the one that has just ended.

        Of several iterations a step it is one of this step or of the step before.
        """
        if not self._every or iteration % self._every or iteration <= self._iteration:
            return False
        least, most = self._ahead
        return (
            least <= most and 0 <= self._per_step * self._steps + most - iteration < self._per_step
        )

    def _place(self, iteration: int) -> bool:
        """Narrow down how far iterations are ahead, by what the log shows at this step.

        Return whether a step turns out to have another number of iterations.
        """
        if iteration <= self._former:
            return False
        behind = iteration - self._per_step * self._steps
        # The next sampled one would stand in the log otherwise.
        gap = self._every or (1 if iteration < FIRST else BY_ITSELF)
        least, most = max(self._ahead[0], behind), min(self._ahead[1], behind + gap - 1)
        # It changes where a forward pass had no step, as an update that is left out by AMP.
        self._ahead = (least, most) if least <= most else (behind, behind + gap - 1)
        return bool(self._every) and self._count(iteration)

    def _count(self, iteration: int) -> bool:
        """Count the iterations of a step: several where each of its batches is averaged."""
        if self._paced is None:
            self._paced = (self._steps, iteration)
        steps = self._steps - self._paced[0]
        if steps < PACE_OVER * self._every:
            return False
        per_step = max(1, round((iteration - self._paced[1]) / steps))
        self._paced = (self._steps, iteration)
        if per_step == self._per_step:
            return False
        self._per_step, self._ahead = per_step, NOTHING_KNOWN
        return True

    def _choose(self, module: Any, iteration: int, now_s: float) -> None:
        """Choose how far apart samples lie, by the step time since the last choice."""
        steps, began_s = self._judged
        self._judged = (self._steps, now_s)
        step_s = max((now_s - began_s) / max(1, self._steps - steps), 1e-6)
        every = distance(step_s, on_cuda=self._on_cuda, per_step=self._per_step)
        if every != self._every:
            self._every, self._former, self._paced = every, iteration, None
            module._set_ddp_runtime_logging_sample_rate(every)
        self._doubt = True
        self._look_aside()

    def _look_aside(self) -> None:
        """Count the modules that are trained; one that is done with no longer gets ahead."""
        kept = []
        for ref, before, trains in self._others:
            module = ref()
            if module is not None:
                iteration = logged_iteration(module)
                kept.append((ref, iteration, trains or iteration > before))
        self._others = kept
        self._models = 1 + sum(trains for _, _, trains in kept)

    def _due(self) -> int:
        """Return the step after which to read next.

        One after which the log shows a new iteration if they are as far ahead as in the middle of
        what is possible, or, to be sure, one more than is known.
        """
        least, most = self._ahead
        ahead = (least + most + 1) // 2
        if least == most and self._doubt:
            ahead, self._doubt = most + 1, False
        sample = ((self._per_step * self._steps + ahead) // self._every + 1) * self._every
        return -((ahead - sample) // self._per_step)


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


def logged_iteration(module: Any) -> int:
    """Return the iteration that the log of this DistributedDataParallel shows, -1 without one."""
    log: Mapping[str, int] = module.logger._get_ddp_logging_data().ints_map
    return log.get("iteration", -1)


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
