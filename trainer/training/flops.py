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
import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stepscope.store.cuda_readback import MetricRow
from trainer.config import Precision, RunConfig, Strategy
from trainer.config_validation import TrainDevice
from trainer.workloads.task import Task

log = logging.getLogger(__name__)

_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_H100_PCIE = "https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306"
_AMPERE_GAMING = (
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_ADA_GAMING = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
_BLACKWELL_GAMING = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
    "nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Dense TFLOP/s, None if unsupported; `name` matches the device's without "NVIDIA"."""

    name: str
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float
    source: str


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """Peak FLOP/s of a device for one precision, and the URL of its source."""

    flops: float
    source: str


PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak("GB200", 80, 1250, 2500, 2500, f"{_NVIDIA}/gb200-nvl72/"),
    DevicePeak("B200", 75, 1125, 2250, 2250, f"{_NVIDIA}/hgx/"),
    DevicePeak("GH200 .*", 67, 494, 990, 990, f"{_NVIDIA}/grace-hopper-superchip/"),
    DevicePeak("H200", 67, 494.5, 989.5, 989.5, f"{_NVIDIA}/h200/"),
    DevicePeak("H200 NVL", 60, 417.5, 835.5, 835.5, f"{_NVIDIA}/h200/"),
    DevicePeak(r"H100 \d+GB HBM3", 67, 494.5, 989.5, 989.5, f"{_NVIDIA}/h100/"),
    DevicePeak("H100 NVL", 60, 417.5, 835.5, 835.5, f"{_NVIDIA}/h100/"),
    DevicePeak("H100 PCIe", 51, 378, 756.5, 756.5, _H100_PCIE),
    DevicePeak("A100[- ].*", 19.5, 156, 312, 312, _A100),
    DevicePeak("A30", 10.3, 82, 165, 165, f"{_NVIDIA}/products/a30-gpu/"),
    DevicePeak("A10", 31.2, 62.5, 125, 125, f"{_NVIDIA}/products/a10-gpu/"),
    DevicePeak("A40", 37.4, 74.8, 149.7, 149.7, f"{_NVIDIA}/a40/"),
    DevicePeak("L4", 30.3, 60, 121, 121, f"{_NVIDIA}/l4/"),
    DevicePeak("L40", 90.5, 90.5, 181, 181, f"{_NVIDIA}/l40/"),
    DevicePeak("L40S", 91.6, 183, 362, 362, f"{_NVIDIA}/l40s/"),
    DevicePeak("(Tesla )?T4", 8.1, None, None, 65, f"{_NVIDIA}/tesla-t4/"),
    DevicePeak(r"(Tesla )?V100-SXM2-\d+GB", 15.7, None, None, 125, f"{_NVIDIA}/v100/"),
    DevicePeak(r"(Tesla )?V100-PCIE-\d+GB", 14, None, None, 112, f"{_NVIDIA}/v100/"),
    DevicePeak(r"(Tesla )?V100S-PCIE-\d+GB", 16.4, None, None, 130, f"{_NVIDIA}/v100/"),
    DevicePeak("RTX A6000", 38.7, 77.4, 154.8, 154.8, _AMPERE_GAMING),
    DevicePeak("GeForce RTX 3090", 35.6, 35.6, 71, 71, _AMPERE_GAMING),
    DevicePeak("GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2, _ADA_GAMING),
    DevicePeak("GeForce RTX 5090", 104.8, 104.8, 209.5, 209.5, _BLACKWELL_GAMING),
)


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


def peak_of(device: str | None, precision: Precision) -> PeakFlops | str:
    """Return the peak of a GPU by its name (None for a CPU), or the reason why it is unknown."""
    if device is None:
        return "No MFU: a CPU's peak depends on its cores, clock and vector units."
    if " MIG " in device:
        return f"No MFU: {device} is a part of a GPU."
    name = device.removeprefix("NVIDIA ")
    known = next((peak for peak in PEAKS if re.fullmatch(peak.name, name)), None)
    if known is None:
        return f"No MFU: the peak of {device} is unknown."
    tflops = getattr(known, precision.removeprefix("pure_"))
    if tflops is None:
        return f"No MFU: {device} has no native {precision} arithmetic."
    return PeakFlops(tflops * 1e12, known.source)
