"""How many floating-point operations a step needs, how fast they are done, and of which peak.

    TFLOP/s = model FLOPs of the step / step time / 1e12
    MFU     = model FLOPs of the step / step time / peak FLOP/s of the process's devices

*Model* FLOPs are those of the model as it is written, forward and backward, a multiplication and an
addition counting as two. What activation checkpointing computes again does not count (with it they
would be hardware FLOPs), nor does what is not a matrix product, convolution or attention. Causal
attention counts in full. Formula: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B. Operations
are counted by torch.utils.flop_counter.FlopCounterMode.
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
    """Turns a step's samples and seconds into speeds.

    `per_sample` is None where the operations could not be counted; then `reason` says why.
    """

    per_sample: float | None
    peak: PeakFlops | str
    reason: str | None = None

    @classmethod
    def of(cls, task: Task, config: RunConfig, device: TrainDevice) -> FlopsMeter:
        """Count once; call it before the model is changed by checkpointing or compiling."""
        peak = peak_of(None if device.cuda_index is None else device.name, config.precision)
        if isinstance(peak, PeakFlops) and config.strategy is Strategy.DP:  # one process, many GPUs
            peak = replace(peak, flops=peak.flops * config.devices_per_node)
        samples = max(1, min(config.batch_size, task.train.length))
        try:
            flops = count(task, samples)
        except Exception as error:  # noqa: BLE001 - a model may refuse; training goes on without
            first = str(error).strip().split("\n")[0].rstrip(".")[:200]
            reason = f"Not counted: the model does not run without values ({first})."
            log.info("%s", reason)
            return cls(None, peak, reason)
        if not flops:
            return cls(None, peak, "Not counted: no operation of the model is one that is counted.")
        return cls(flops / samples, peak)

    def row(self, samples: int, seconds: float) -> MetricRow:
        """Return the metrics of a step of so many samples; none where nothing was counted."""
        if self.per_sample is None:
            return {}
        speed = self.per_sample * samples / seconds
        row: MetricRow = {"perf/tflops": speed / 1e12}
        if isinstance(self.peak, PeakFlops):
            row["perf/mfu"] = 100 * speed / self.peak.flops
        return row

    def facts(self, samples: int) -> dict[str, Any]:
        """Return what run.json keeps; `samples` is a whole step's."""
        peak = self.peak if isinstance(self.peak, PeakFlops) else None
        return {
            "flops_per_step": None if self.per_sample is None else self.per_sample * samples,
            "flops_reason": self.reason,
            "peak_flops": peak and peak.flops,
            "peak_source": peak and peak.source,
            "peak_reason": None if peak else self.peak,
        }


def count(task: Task, samples: int) -> int:
    """Return the FLOPs of forward and backward on a batch of so many samples.

    The model is copied without its values onto torch's meta device, where operations compute shapes
    only: no memory, no random numbers, nothing of the model changes. Takes some 10 ms. Raises what
    a model raises that needs values, such as one that calls .item().
    """
    with torch.device("meta"):
        # deepcopy takes the tensors of this table in place of copies.
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
