"""What a workload hands to the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trainer.data import Split
from trainer.step import LossFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model with its data and loss; the model's initial weights come from the seed."""

    model: nn.Module
    train: Split
    validation: Split
    loss: LossFunction  # mean over the batch
    classifies: bool = True  # outputs are class scores, so accuracy means something
    watched: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters of one element recorded every step, by metric key."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the page should know about the data, for run.json."""
