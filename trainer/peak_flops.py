"""Peak FLOP/s of GPUs by name and precision, from NVIDIA's data sheets.

Figures are dense: half of those "with sparsity". 16-bit figures are for FP32 accumulation, which
torch uses; GeForce cards are twice as fast with FP16 accumulation. Clocks are boost clocks, so a
card with a higher limit may exceed 100%.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.config import Precision

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
    """Dense peaks of a GPU model in TFLOP/s; None for unsupported arithmetic.

    `name` is a regular expression for the driver's device name without "NVIDIA".
    """

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
