"""Builds the task of a workload."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config import RunConfig, Workload
from trainer.workloads import custom, digits, gpt, images, linear, residual_cnn
from trainer.workloads.task import Task

WORKLOADS: dict[Workload, Callable[[RunConfig], Task]] = {
    Workload.LINEAR: linear.task,
    Workload.DIGITS_MLP: digits.mlp_task,
    Workload.DIGITS_CNN: digits.cnn_task,
    Workload.IMAGES: images.task,
    Workload.GPT: gpt.task,
    Workload.RESNET: residual_cnn.resnet_task,
    Workload.MEMORY_STRESS: residual_cnn.memory_stress_task,
    Workload.CUSTOM: custom.task,
}


def build_task(config: RunConfig) -> Task:
    """Return the model, data and loss of a run."""
    return WORKLOADS[config.workload](config)
