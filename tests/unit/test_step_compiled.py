"""The compiled model takes the step, whatever else it can be asked."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from trainer.training.step import TrainStep


class Compiled:
    """As torch.compile's wrapper: it has `__len__`, which fails for a model without a length."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.calls = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self._model(inputs)
        return outputs

    def __len__(self) -> int:
        raise TypeError("Linear does not support len()")


def test_a_compiled_model_without_a_length_takes_the_step() -> None:
    model = nn.Linear(2, 1)
    compiled = Compiled(model)
    step = TrainStep(
        model=model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        autocast=nullcontext(),
        max_grad_norm=0.0,
        wrapped=compiled,
    )
    step(torch.ones(4, 2), torch.zeros(4, 1))
    assert compiled.calls == 1
