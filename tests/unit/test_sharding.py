"""FSDP2: who holds which weights, and what is sent when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.support.train_devices import CPU_DEVICE
from trainer.config import RunConfig, Runner, Strategy, Workload
from trainer.training import fsdp
from trainer.training.fsdp import weights_on_first_rank
from trainer.training.model import ParallelModel, prepare
from trainer.training.rank_info import TrainerRank
from trainer.workloads.gpt import Gpt

FSDP = RunConfig(
    workload=Workload.GPT,
    runner=Runner.TORCHRUN,
    strategy=Strategy.FSDP,
    devices_per_node=2,
    width=16,
    num_layers=2,
)
SECOND = TrainerRank(rank=1, local_rank=1, world_size=2, local_size=2)


class Masked(nn.Module):
    """A weight beside a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("mask", torch.ones(2, 2).tril(), persistent=False)


def test_ranks_after_the_first_build_a_model_without_the_memory_of_its_weights() -> None:
    with weights_on_first_rank(FSDP, SECOND):
        model, masked = Gpt(FSDP, 7), Masked()
    assert all(weights.is_meta for weights in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert masked.weights.is_meta
    assert masked.mask.tolist() == [[1, 0], [1, 1]]
    assert not nn.Linear(1, 1).weight.is_meta


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, replace(SECOND, rank=0)),
        ({"workload": Workload.CUSTOM}, SECOND),
        ({"strategy": Strategy.DDP}, SECOND),
    ],
)
def test_rank_0_ddp_and_workloads_of_the_user_build_whole_models(
    changes: dict[str, Any], ranks: TrainerRank
) -> None:
    with weights_on_first_rank(replace(FSDP, **changes), ranks):
        assert not nn.Linear(1, 1).weight.is_meta


def test_each_block_gets_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has given its memory back when the next one gets its own."""
    calls: list[nn.Module] = []
    given: list[nn.Parameter] = []

    def spread(module: nn.Module, **_: object) -> None:
        calls.append(module)
        given.extend(part for part in module.parameters() if all(part is not one for one in given))
        have = {id(part) for part in model.parameters() if not part.is_meta}
        assert have == {id(part) for part in given}

    monkeypatch.setattr(fsdp, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(fsdp, "_send_from_first", lambda *_: None)
    monkeypatch.setattr(fsdp, "fully_shard", spread)
    with weights_on_first_rank(FSDP, SECOND):
        model = Gpt(FSDP, 7)
    assert prepare(model, FSDP, torch.device("cpu"), SECOND) is model
    assert model.head.weight is model.embedding.weight
    assert calls == [*model.blocks, model]


class Spread(nn.Linear, FSDPModule):
    """What fully_shard makes of a module, as far as it is asked when to reduce gradients."""

    def __init__(self) -> None:
        nn.Linear.__init__(self, 1, 1)
        self.reduces: list[bool] = []

    def set_requires_gradient_sync(self, requires: bool, *, recurse: bool = True) -> None:
        self.reduces.append(requires)


def test_gradients_are_sent_once_a_step() -> None:
    model = object.__new__(Spread)  # FSDPModule.__new__ is for modules that are spread already
    Spread.__init__(model)
    shared = ParallelModel.of(model, FSDP, [CPU_DEVICE])
    with shared.no_sync():
        assert model.reduces == [False]
    assert model.reduces == [False, True]
