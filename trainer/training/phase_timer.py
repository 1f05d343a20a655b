"""The phases of a step on this rank: forward, backward, optimizer, and what DDP knows of them.

Only in a job of several processes, where they tell who is slow (docs/distributed.md).
"""

from __future__ import annotations

import logging
import time

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTiming
from stepscope.recorder.cuda_readback import MetricRow

log = logging.getLogger(__name__)


class TrainPhaseTimer:
    """Adds up the times of a step's batches; used by the training thread alone."""

    def __init__(self, model: nn.Module) -> None:
        """`model` is what training runs, in DistributedDataParallel or not."""
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        self._ddp: DdpTiming | None = None
        if isinstance(model, DistributedDataParallel):
            self._ddp = DdpTiming()
            self._ddp.meet(model)

    def add(self, began_s: float, forwarded_s: float, ended_s: float) -> None:
        """Add a batch by its times on the host's clock; its update ends now."""
        self._forward_s += forwarded_s - began_s
        self._backward_s += ended_s - forwarded_s
        self._optimizer_s += time.perf_counter() - ended_s

    def take(self) -> MetricRow:
        """Return the times of the step that ends now, in seconds by metric."""
        row: MetricRow = {
            "perf/forward": self._forward_s,
            "perf/backward": self._backward_s,
            "perf/optimizer": self._optimizer_s,
        }
        self._forward_s = self._backward_s = self._optimizer_s = 0.0
        if self._ddp is not None:
            try:
                self._ddp.add(row, time.perf_counter())
            except Exception as error:  # noqa: BLE001 - another torch; the training must go on
                log.warning("%s will be missing from here on (%s)", DDP_METRICS, error)
                self._ddp = None
        return row
