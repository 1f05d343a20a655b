"""The step: equal to the textbook's, clipped by the true norm, no gradients left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.config import Precision
from trainer.training.precision import autocast, grad_scaler
from trainer.training.step import TrainStep


def make(
    clip_norm: float = 0.0,
    precision: Precision = Precision.FP32,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return TrainStep(
        model=model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scaler=scaler or grad_scaler(precision),
        autocast=autocast(precision, torch.device("cpu")),
        clip_norm=clip_norm,
    )


BATCH = (torch.ones(3, 4), torch.full((3, 2), 5.0))


def test_it_does_what_the_textbook_does() -> None:
    step, reference = make(), make()
    loss, norm = step(*BATCH)
    expected = reference.loss(reference.model(BATCH[0]), BATCH[1])
    torch.autograd.backward(expected)
    reference.optimizer.step()
    assert torch.equal(loss, expected.detach())
    assert norm is None
    for ours, theirs in zip(step.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


def test_clipping_limits_the_update_and_reports_the_norm_before() -> None:
    step = make(clip_norm=0.01)
    before = [p.detach().clone() for p in step.model.parameters()]
    _, norm = step(*BATCH)
    assert norm is not None
    assert norm.item() > 1
    moved = torch.cat(
        [(p - b).flatten() for p, b in zip(step.model.parameters(), before, strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_the_limit_is_meant_for_the_gradients_without_the_loss_scale() -> None:
    scaled = make(clip_norm=0.01, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    plain = make(clip_norm=0.01)
    _, norm = scaled(*BATCH)
    _, true_norm = plain(*BATCH)
    assert norm is not None
    assert true_norm is not None
    assert norm.item() == pytest.approx(true_norm.item())
    for ours, theirs in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-7)


def test_a_step_with_infinite_gradients_is_skipped_and_the_scale_halved() -> None:
    step = make(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    before = [p.detach().clone() for p in step.model.parameters()]
    step(torch.full((3, 4), 1e38), BATCH[1])
    for weights, former in zip(step.model.parameters(), before, strict=True):
        assert torch.equal(weights, former)
        assert weights.grad is None
    assert step.scaler.get_scale() == 512.0


def test_bf16_keeps_weights_and_loss_in_fp32() -> None:
    step = make(precision=Precision.BF16)
    loss, _ = step(*BATCH)
    assert loss.dtype in (torch.float32, torch.bfloat16)
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
