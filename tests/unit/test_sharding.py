"""FSDP2: when gradients are sent."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.support.train_devices import CPU_DEVICE
from trainer.config import RunConfig, Runner, Strategy
from trainer.training.model import ParallelModel

FSDP = RunConfig(runner=Runner.TORCHRUN, strategy=Strategy.FSDP, devices_per_node=2)


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
