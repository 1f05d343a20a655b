"""The validation of one of several ranks, where a split leaves samples out."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config import RunConfig
from trainer.error_messages import RunFailedError
from trainer.training.accelerator import CpuAccelerator
from trainer.training.loaders import HostLoader
from trainer.training.loop import TrainLoop
from trainer.training.rank_info import TrainerRank
from trainer.workloads.task import Batch, TensorSplit


@dataclass(frozen=True, slots=True)
class Broken:
    """The numbers 0 to `length` - 1, without those that cannot be read."""

    length: int
    broken: frozenset[int]

    def take(self, indices: Tensor) -> Batch:
        kept = [index for index in indices.tolist() if index not in self.broken]
        return torch.tensor(kept).float().unsqueeze(1), torch.tensor(kept)

    def room(self, size: int) -> Batch:
        return TensorSplit.of(torch.zeros(1, 1), torch.zeros(1)).room(size)


class Seen(TrainerRank):
    """A rank whose sums are its own share of them."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def copy_from_first(self, tensors: Any) -> None:
        pass


def validated(ranks: TrainerRank, split: Broken, batch_size: int) -> tuple[float, float | None]:
    """Return the mean of the samples that were counted; no accuracy."""
    config, compute = RunConfig(batch_size=batch_size), CpuAccelerator()
    loop: Any = SimpleNamespace(
        reader=SimpleNamespace(flush=lambda: None),
        recorder=SimpleNamespace(signs=0),
        task=SimpleNamespace(validation=split, classifies=False),
        training=SimpleNamespace(
            model=torch.nn.Linear(1, 1), ranks=ranks, compute=compute, config=config
        ),
        validation_loader=HostLoader(split, config, compute),
        step=SimpleNamespace(
            evaluate=lambda inputs, targets, counted: (inputs, inputs[:counted].mean())
        ),
        _last_saved=float("inf"),
    )
    return TrainLoop._validate(loop)


def test_a_batch_without_a_sample_ends_the_job_in_place_of_a_forward_pass_less() -> None:
    """With FSDP the others would wait in its all-gather for ever."""
    with pytest.raises(RunFailedError, match="No sample of a batch could be loaded, and the other"):
        validated(Seen(rank=1, world_size=2), Broken(8, frozenset({1, 3})), 2)


def test_a_repeated_sample_is_not_counted_where_others_are_left_out() -> None:
    # Rank 1 of 2 takes 1, 3 and, so that both take three, 0 once more.
    loss, _ = validated(Seen(rank=1, world_size=2), Broken(5, frozenset({1})), 2)
    assert loss == 3.0
