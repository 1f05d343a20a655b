"""Torch's process-wide flags, set for a run and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from trainer.config import RunConfig
from trainer.training.precision import precision_flags


@contextmanager
def run_flags(config: RunConfig) -> Iterator[None]:
    """Set the flags of precision, of cuDNN and of determinism, and put the former ones back."""
    with precision_flags(config.precision), _cudnn(config), _determinism(config.deterministic):
        yield


@contextmanager
def _cudnn(config: RunConfig) -> Iterator[None]:
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark = config.cudnn_benchmark
    cudnn.deterministic = config.deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
