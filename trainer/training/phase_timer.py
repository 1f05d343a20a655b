"""Times of forward, backward and optimizer of a rank, to find stragglers."""

from __future__ import annotations

import time

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTiming
from stepscope.store.cuda_readback import MetricRow
from stepscope.watch.hooks.patching import HookGuard


class TrainPhaseTimer:
    """Sums forward, backward and optimizer times of a step's micro-batches, to find stragglers."""

    def __init__(self, model: nn.Module) -> None:
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        self._ddp, self._guard = DdpTiming(), HookGuard(DDP_METRICS)
        if isinstance(model, DistributedDataParallel):
            self._ddp.attach(model)

    def add(self, began_s: float, forwarded_s: float, ended_s: float) -> None:
        """Add a micro-batch by its host times in seconds; its update ends now."""
        self._forward_s += forwarded_s - began_s
        self._backward_s += ended_s - forwarded_s
        self._optimizer_s += time.perf_counter() - ended_s

    def take(self) -> MetricRow:
        """Return the times of the step in seconds by metric key, and reset them."""
        row: MetricRow = {
            "perf/forward": self._forward_s,
            "perf/backward": self._backward_s,
            "perf/optimizer": self._optimizer_s,
        }
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        self._guard.call(self._ddp.add, row, time.perf_counter())
        return row
