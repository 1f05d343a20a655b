"""Sizes with which each workload that brings its own data takes a second or two on a CPU."""

from __future__ import annotations

from typing import Any

from trainer.config import Workload

SMALL: dict[Workload, dict[str, Any]] = {
    Workload.LINEAR: {},
    Workload.DIGITS_MLP: {},
    Workload.DIGITS_CNN: {},
    Workload.GPT: {"num_layers": 1, "width": 16, "context_length": 16, "batch_size": 64},
    Workload.RESNET: {"width": 8, "image_size": 32, "batch_size": 64},
    Workload.MATMUL: {"width": 32},
    Workload.MEMORY_STRESS: {"width": 8, "image_size": 8},
}
