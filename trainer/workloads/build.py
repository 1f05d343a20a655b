"""Builds the task of a workload."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config import RunConfig, Workload
from trainer.workloads import custom, digits, gpt, images, linear, matmul, memory_stress, resnet
from trainer.workloads.task import Task

WORKLOADS: dict[Workload, Callable[[RunConfig], Task]] = {
    Workload.LINEAR: linear.task,
    Workload.DIGITS_MLP: digits.mlp_task,
    Workload.DIGITS_CNN: digits.cnn_task,
    Workload.IMAGES: images.task,
    Workload.GPT: gpt.task,
    Workload.RESNET: resnet.task,
    Workload.MATMUL: matmul.task,
    Workload.MEMORY_STRESS: memory_stress.task,
    Workload.CUSTOM: custom.task,
}


def build_task(config: RunConfig) -> Task:
    """Return the model, data and loss of a run."""
    return WORKLOADS[config.workload](config)
