"""The configuration that tries a run again which had too little memory; pure, no torch import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer.config import ConfigError, ConfigIssue, RunConfig
from trainer.config_validation import TrainDevice, validate


def half_batch(config: RunConfig, devices: Sequence[TrainDevice]) -> RunConfig | ConfigIssue:
    """Return the run with half the batch and twice the accumulation, or why it cannot be.

    A step then uses the same samples (one fewer for each batch of odd size), and half of them at a
    time. It starts afresh, not from a checkpoint.
    """
    if config.batch_size < 2:
        return ConfigIssue(
            "batch_size", "a batch of one sample cannot be halved", "Lower other sizes"
        )
    try:
        smaller = replace(
            config,
            batch_size=config.batch_size // 2,
            gradient_accumulation_steps=2 * config.gradient_accumulation_steps,
        )
    except ConfigError as error:
        return error.problem
    return next(iter(validate(smaller, devices)), smaller)
