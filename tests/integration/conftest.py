"""What several integration tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from trainer.training.checkpoint import write_checkpoint
from trainer.training.commands import TrainerCommands

SaveAtStep = Callable[[int], None]


@pytest.fixture
def saving_at_step(monkeypatch: pytest.MonkeyPatch) -> SaveAtStep:
    """Return a function that makes the next run save a checkpoint after a step, as the button."""
    return partial(save_at_step, monkeypatch)


def save_at_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the next run save a checkpoint after a step, as the button does."""

    def save(self: TrainerCommands) -> None:
        if self._training.step == step:
            path = self._recorder.folder / f"step-{step}.pt"
            write_checkpoint(path, self._training.state_dict())

    monkeypatch.setattr(TrainerCommands, "check", save)
