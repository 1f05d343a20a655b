"""The validation of one of several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainer.config import RunConfig
from trainer.train import TrainLoop
from trainer.training.accelerator import CpuAccelerator
from trainer.training.loaders import Loader
from trainer.training.rank_info import TrainerRank
from trainer.workloads.task import TensorSplit


class Seen(TrainerRank):
    """A rank whose sums are its own share of them."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def copy_from_first(self, tensors: Any) -> None:
        pass


def validated(ranks: TrainerRank, split: TensorSplit, batch_size: int) -> float:
    """Return the mean of the samples that were counted."""
    config, compute = RunConfig(batch_size=batch_size), CpuAccelerator()
    loop: Any = SimpleNamespace(
        reader=SimpleNamespace(flush=lambda: None),
        task=SimpleNamespace(validation=split, classifies=False),
        training=SimpleNamespace(
            model=torch.nn.Linear(1, 1), ranks=ranks, compute=compute, config=config
        ),
        validation_loader=Loader(split, config, compute),
        evaluate=lambda inputs, targets, counted: (inputs, inputs[:counted].mean()),
        log=SimpleNamespace(recorder=SimpleNamespace(activity=0), is_save_due=lambda: False),
    )
    return TrainLoop._validate(loop)[0]


def test_a_repeated_sample_is_not_counted() -> None:
    # Rank 1 of 2 takes 1, 3 and, so that both take three, 0 once more.
    split = TensorSplit.of(torch.arange(5.0)[:, None], torch.arange(5))
    assert validated(Seen(rank=1, world_size=2), split, 2) == 2.0
