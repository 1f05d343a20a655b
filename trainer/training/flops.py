"""Model FLOPs of a step, TFLOP/s and MFU.

    TFLOP/s = model FLOPs of the step / step time / 1e12
    MFU     = model FLOPs of the step / step time / peak FLOP/s of the process's devices

Model FLOPs: matrix products, convolutions and (full) attention of forward and backward, two per
multiply-add, without recomputation by activation checkpointing. Formula: Chowdhery et al., PaLM,
arXiv:2204.02311, appendix B. Counted by torch.utils.flop_counter.FlopCounterMode.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stepscope.recorder.cuda_readback import MetricRow
from trainer.config import RunConfig, Strategy
from trainer.config_validation import TrainDevice
from trainer.peak_flops import PeakFlops, peak_of
from trainer.workloads.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlopsMeter:
    """Computes TFLOP/s and MFU of steps; `per_sample` is None for a `reason`."""

    per_sample: float | None
    peak: PeakFlops | str
    reason: str | None = None

    @classmethod
    def of(cls, task: Task, config: RunConfig, device: TrainDevice) -> FlopsMeter:
        """Count the FLOPs of a task, before checkpointing or compiling changes its model."""
        peak = peak_of(None if device.cuda_index is None else device.name, config.precision)
        if isinstance(peak, PeakFlops) and config.strategy is Strategy.DP:  # one process, many GPUs
            peak = replace(peak, flops=peak.flops * config.devices_per_node)
        samples = max(1, min(config.batch_size, task.train.length))
        try:
            flops = count(task, samples)
        except Exception as error:  # noqa: BLE001 - a model may need values; training continues
            first = str(error).strip().split("\n")[0].rstrip(".")[:200]
            reason = f"Not counted: the model does not run without values ({first})."
            log.info("%s", reason)
            return cls(None, peak, reason)
        if not flops:
            return cls(None, peak, "Not counted: the model has no counted operation.")
        return cls(flops / samples, peak)

    def row(self, samples: int, seconds: float) -> MetricRow:
        """Return the metrics of a step; empty without a FLOP count."""
        if self.per_sample is None:
            return {}
        speed = self.per_sample * samples / seconds
        row: MetricRow = {"perf/tflops": speed / 1e12}
        if isinstance(self.peak, PeakFlops):
            row["perf/mfu"] = 100 * speed / self.peak.flops
        return row

    def facts(self, samples: int) -> dict[str, Any]:
        """Return the values for run.json; `samples` are those of an optimizer step."""
        peak = self.peak if isinstance(self.peak, PeakFlops) else None
        return {
            "flops_per_step": None if self.per_sample is None else self.per_sample * samples,
            "flops_reason": self.reason,
            "peak_flops": peak and peak.flops,
            "peak_source": peak and peak.source,
            "peak_reason": None if peak else self.peak,
        }


def count(task: Task, samples: int) -> int:
    """Return the FLOPs of forward and backward on a batch of `samples` samples, in about 10 ms.

    Runs a copy of the model on the meta device: no memory, no random numbers, no change of the
    model. Raises the error of a model that needs values, for example for .item().
    """
    with torch.device("meta"):
        # deepcopy uses this memo instead of copying the tensors.
        copies: dict[int, Tensor] = {
            id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            for tensor in task.model.parameters()
        }
        buffers = task.model.buffers()
        copies |= {id(tensor): torch.empty_like(tensor, device="meta") for tensor in buffers}
        model = copy.deepcopy(task.model, copies).train()
        inputs, targets = (part.to("meta") for part in task.train.room(samples))
        with FlopCounterMode(display=False) as counter:
            loss = task.loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
