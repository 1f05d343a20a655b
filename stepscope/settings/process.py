"""Settings of the process: backend flags and threads."""

from __future__ import annotations

import sys
from typing import Any

from stepscope.settings.setting import Moment, Setting, Training

TF32_CAPABILITY = (8, 0)  # Ampere


class Tf32(Setting):
    name = "tf32"
    code = 'torch.set_float32_matmul_precision("high")'
    moment = Moment.TRAINING

    def problem(self, subject: Training) -> str | None:
        torch = sys.modules["torch"]
        if subject.device.type != "cuda":
            return f"TF32 needs an NVIDIA GPU; the script trains on {subject.device.type}."
        major, minor = torch.cuda.get_device_capability(subject.device)
        if (major, minor) < TF32_CAPABILITY:
            return f"TF32 needs compute capability 8.0; this GPU has {major}.{minor}."
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:
            return "The script sets torch.backends' newer fp32_precision itself."
        if precision != "highest":
            return f"The script already sets float32_matmul_precision to {precision}."
        return None

    def enter(self, subject: Training) -> None:
        self._torch = sys.modules["torch"]
        self._torch.set_float32_matmul_precision("high")

    def evidence(self) -> tuple[bool, str]:
        precision = self._torch.get_float32_matmul_precision()
        return precision == "high", f"float32_matmul_precision is {precision}."


class CudnnBenchmark(Setting):
    name = "cudnn_benchmark"
    code = "torch.backends.cudnn.benchmark = True"
    moment = Moment.MODEL

    def problem(self, subject: Training) -> str | None:
        torch = sys.modules["torch"]
        cudnn = torch.backends.cudnn
        convolution = torch.nn.modules.conv._ConvNd
        if subject.device.type != "cuda":
            return f"cuDNN needs an NVIDIA GPU; the script trains on {subject.device.type}."
        if cudnn.benchmark:
            return "The script already sets torch.backends.cudnn.benchmark."
        if cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return "The script requires deterministic algorithms."
        if not any(isinstance(module, convolution) for module in subject.model.modules()):
            return f"{type(subject.model).__name__} has no convolution."
        return None

    def enter(self, subject: Training) -> None:
        self._cudnn = sys.modules["torch"].backends.cudnn
        self._cudnn.benchmark = True

    def evidence(self) -> tuple[bool, str]:
        return self._cudnn.benchmark, f"torch.backends.cudnn.benchmark is {self._cudnn.benchmark}."


class Threads(Setting):
    name = "threads"
    code = "torch.set_num_threads({value})"
    moment = Moment.IMPORT
    bounds = (1, 1024)

    def problem(self, subject: Any) -> str | None:
        if subject.get_num_threads() == self.value:
            return f"torch already uses {self.value} intra-op threads."
        return None

    def enter(self, subject: Any) -> None:
        self._torch = subject
        subject.set_num_threads(self.value)

    def evidence(self) -> tuple[bool, str]:
        count = self._torch.get_num_threads()
        return count == self.value, f"torch.get_num_threads() is {count}."
