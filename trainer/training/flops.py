"""Model FLOPs of a step, TFLOP/s and MFU.

    TFLOP/s = model FLOPs of the step / step time / 1e12
    MFU     = model FLOPs of the step / step time / peak FLOP/s of the process's devices

Model FLOPs: matrix products, convolutions and (full) attention of forward and backward, two per
multiply-add, without recomputation by activation checkpointing. Formula: Chowdhery et al., PaLM,
arXiv:2204.02311, appendix B. Counted by torch.utils.flop_counter.FlopCounterMode.

Peaks are from NVIDIA's data sheets, dense: half of those "with sparsity". 16-bit figures are for
FP32 accumulation, which torch uses; GeForce cards are twice as fast with FP16 accumulation. Clocks
are boost clocks, so a card with a higher limit may exceed 100%.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stepscope.common.json_values import first_line
from stepscope.store.cuda_readback import MetricRow
from trainer.config import Precision, RunConfig, Strategy
from trainer.training.config_validation import TrainDevice
from trainer.workloads.task import Task, empty_batch

PEAKS: dict[str, tuple[float, float | None, float]] = {
    "GB200": (80, 1250, 2500),
    "B200": (75, 1125, 2250),
    "GH200 .*": (67, 494, 990),
    "H200": (67, 494.5, 989.5),
    "H200 NVL": (60, 417.5, 835.5),
    r"H100 \d+GB HBM3": (67, 494.5, 989.5),
    "H100 NVL": (60, 417.5, 835.5),
    "H100 PCIe": (51, 378, 756.5),
    "A100[- ].*": (19.5, 156, 312),
    "A30": (10.3, 82, 165),
    "A10": (31.2, 62.5, 125),
    "A40": (37.4, 74.8, 149.7),
    "L4": (30.3, 60, 121),
    "L40": (90.5, 90.5, 181),
    "L40S": (91.6, 183, 362),
    "(Tesla )?T4": (8.1, None, 65),
    "RTX A6000": (38.7, 77.4, 154.8),
    "GeForce RTX 3090": (35.6, 35.6, 71),
    "GeForce RTX 4090": (82.6, 82.6, 165.2),
    "GeForce RTX 5090": (104.8, 104.8, 209.5),
}
"""Dense TFLOP/s in fp32, tf32 (None before Ampere, as is bf16) and 16 bits.

The key matches the device's name without "NVIDIA". From https://www.nvidia.com/en-us/data-center/
and the papers of the Ampere (GA102), Ada and Blackwell GPU architectures.
"""


@dataclass(frozen=True, slots=True)
class FlopsMeter:
    """Computes TFLOP/s and MFU of steps; `per_sample` is None for a `reason`."""

    per_sample: float | None
    peak: float | str
    reason: str | None = None

    @classmethod
    def of(cls, task: Task, config: RunConfig, device: TrainDevice) -> FlopsMeter:
        """Count the FLOPs of a task, before checkpointing or compiling changes its model."""
        peak = peak_of(None if device.cuda_index is None else device.name, config.precision)
        if not isinstance(peak, str) and config.strategy is Strategy.DP:  # one process, many GPUs
            peak *= config.devices_per_node
        samples = max(1, min(config.batch_size, task.train.length))
        try:
            flops = count(task, samples)
        except Exception as error:  # noqa: BLE001 - a model may need values; training continues
            first = first_line(error).rstrip(".")[:200]
            reason = f"Not counted: the model does not run without values ({first})."
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
        if not isinstance(self.peak, str):
            row["perf/mfu"] = 100 * speed / self.peak
        return row

    def facts(self, samples: int) -> dict[str, Any]:
        """Return the values for run.json; `samples` are those of an optimizer step."""
        unknown = isinstance(self.peak, str)
        return {
            "flops_per_step": None if self.per_sample is None else self.per_sample * samples,
            "flops_reason": self.reason,
            "peak_flops": None if unknown else self.peak,
            "peak_reason": self.peak if unknown else None,
        }


def count(task: Task, samples: int) -> int:
    """Return the FLOPs of forward and backward on a batch of `samples` samples, in about 10 ms.

    Runs a copy of the model on the meta device: no memory, no change of the model. Raises the error
    of a model that needs values, for example for .item().
    """
    inputs, targets = empty_batch(task.train, samples, "meta")
    with torch.device("meta"):
        # deepcopy uses this memo instead of copying the tensors.
        copies: dict[int, Tensor] = {
            id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            for tensor in task.model.parameters()
        }
        buffers = task.model.buffers()
        copies |= {id(tensor): torch.empty_like(tensor, device="meta") for tensor in buffers}
        model = copy.deepcopy(task.model, copies).train()
        with FlopCounterMode(display=False) as counter:
            loss = task.loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def peak_of(device: str | None, precision: Precision) -> float | str:
    """Return the peak FLOP/s of a GPU by its name (None for a CPU), or why it is unknown."""
    if device is None:
        return "No MFU: a CPU's peak depends on its cores, clock and vector units."
    if " MIG " in device:
        return f"No MFU: {device} is a part of a GPU."
    name = device.removeprefix("NVIDIA ")
    known = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
    if known is None:
        return f"No MFU: the peak of {device} is unknown."
    fp32, tf32, half = known
    tflops: float | None = half
    if precision is Precision.FP32:
        tflops = fp32
    elif precision is Precision.TF32:
        tflops = tf32
    elif tf32 is None and precision in (Precision.BF16, Precision.PURE_BF16):
        tflops = None
    if tflops is None:
        return f"No MFU: {device} has no native {precision} arithmetic."
    return tflops * 1e12
