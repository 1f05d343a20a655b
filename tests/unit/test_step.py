"""The step: equal to the textbook's, clipped by the true norm; its model and its flags."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.backends import cudnn

from trainer.config import Precision, RunConfig
from trainer.train import TrainStep
from trainer.training.accelerator import RUN_AHEAD, CudaAccelerator
from trainer.training.model import AS_LOADED, InputFormat, prepare
from trainer.training.phase_timer import TrainPhaseTimer
from trainer.training.precision import autocast, grad_scaler, run_flags

CPU = torch.device("cpu")


def make(
    max_grad_norm: float = 0.0,
    precision: Precision = Precision.FP32,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return TrainStep(
        model=model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scaler=scaler or grad_scaler(precision, CPU),
        autocast=autocast(precision, CPU),
        max_grad_norm=max_grad_norm,
        form=AS_LOADED,
        set_to_none=True,
        wrapped=model,
        no_sync=nullcontext,
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


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 2, 1), (5,)])
def test_accumulated_batches_make_the_step_of_one_large_batch(
    sizes: tuple[int, ...], max_grad_norm: float
) -> None:
    inputs, targets = torch.rand(sum(sizes), 4), torch.rand(sum(sizes), 2)
    step, whole = make(max_grad_norm), make(max_grad_norm)
    expected, expected_norm = whole(inputs, targets)
    parts, norms = [], []
    batches = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    for number, batch in enumerate(batches, 1):
        before = step.model.weight.clone()  # type: ignore[operator]
        part, norm = step(*batch, sum(sizes), number == len(batches))
        assert torch.equal(before, step.model.weight) == (number < len(batches))  # type: ignore[arg-type]
        parts.append(part)
        norms.append(norm)
    assert torch.stack(parts).sum().item() == pytest.approx(expected.item(), rel=1e-6)
    assert norms[:-1] == [None] * (len(sizes) - 1)  # clipped once, at the end
    if expected_norm is not None:
        assert norms[-1] is not None
        assert norms[-1].item() == pytest.approx(expected_norm.item(), rel=1e-6)
    for ours, theirs in zip(step.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_freed_or_filled_with_zeros(set_to_none: bool) -> None:
    step = replace(make(), set_to_none=set_to_none)
    step(*BATCH)
    grads = [weights.grad for weights in step.model.parameters()]
    if set_to_none:
        assert grads == [None, None]
    else:
        assert all(grad is not None and not grad.any() for grad in grads)
    kept = [None if grad is None else grad.data_ptr() for grad in grads]
    step(*BATCH)
    again = [weights.grad for weights in step.model.parameters()]
    assert [None if grad is None else grad.data_ptr() for grad in again] == kept


@pytest.mark.parametrize("precision", [Precision.PURE_BF16, Precision.PURE_FP16])
def test_pure_precisions_take_the_loss_in_fp32(precision: Precision) -> None:
    config = replace(RunConfig(), precision=precision)
    model = prepare(nn.Linear(4, 2), config, CPU)
    seen: list[torch.dtype] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return nn.functional.mse_loss(outputs, targets)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = replace(make(1.0, precision), model=model, wrapped=model, loss=loss, optimizer=optimizer)
    step = replace(step, form=InputFormat.of(config))
    value, norm = step(*BATCH)
    outputs, _ = step.evaluate(*BATCH)
    assert seen == [torch.float32, torch.float32]
    assert value.dtype == outputs.dtype == torch.float32
    assert norm is not None
    assert {p.dtype for p in model.parameters()} == {next(model.parameters()).dtype}
    assert next(model.parameters()).dtype != torch.float32


def test_clipping_limits_the_update_and_reports_the_norm_before() -> None:
    step = make(max_grad_norm=0.01)
    before = [p.detach().clone() for p in step.model.parameters()]
    _, norm = step(*BATCH)
    assert norm is not None
    assert norm.item() > 1
    moved = torch.cat(
        [(p - b).flatten() for p, b in zip(step.model.parameters(), before, strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_the_limit_is_meant_for_the_gradients_without_the_loss_scale() -> None:
    scaled = make(max_grad_norm=0.01, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    plain = make(max_grad_norm=0.01)
    _, norm = scaled(*BATCH)
    _, true_norm = plain(*BATCH)
    assert norm is not None
    assert true_norm is not None
    assert norm.item() == pytest.approx(true_norm.item())
    for ours, theirs in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-7)


def test_a_step_with_infinite_gradients_is_skipped_and_the_scale_halved() -> None:
    step = make(precision=Precision.FP16)
    before = [p.detach().clone() for p in step.model.parameters()]
    step(torch.full((3, 4), 1e38), BATCH[1])
    for weights, former in zip(step.model.parameters(), before, strict=True):
        assert torch.equal(weights, former)
        assert weights.grad is None
    assert step.scaler.get_scale() == 2.0**15


def test_in_a_job_the_times_of_its_parts_are_taken_over_all_batches() -> None:
    phases = TrainPhaseTimer(nn.Linear(1, 1))
    step = replace(make(), phases=phases)
    began = time.perf_counter()
    step(*BATCH, 6, False)
    step(*BATCH, 6, True)
    took = time.perf_counter() - began
    row = phases.take()
    assert set(row) == {"perf/forward", "perf/backward", "perf/optimizer"}
    times = [value for value in row.values() if value is not None]
    assert all(value > 0 for value in times)
    assert sum(times) <= took
    assert not any(phases.take().values())


def test_the_host_runs_so_many_steps_ahead_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued work runs only when an event behind it is waited for, as late as CUDA allows."""
    queued, done = 0, 0

    class LateEvent:
        def __init__(self, blocking: bool) -> None:
            self.position = 0

        def record(self) -> None:
            self.position = queued

        def synchronize(self) -> None:
            nonlocal done
            done = max(done, self.position)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    compute = CudaAccelerator(0)
    for step in range(1, 20):
        queued += 1
        compute.pace()
        assert step - done == min(step, RUN_AHEAD)


# --- the model as a run wants it ------------------------------------------------------------------

IMAGES = torch.rand(2, 3, 8, 8)


def convolutional() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


@pytest.mark.parametrize("wanted", [True, False])
def test_channels_last_is_the_format_of_weights_and_images(wanted: bool) -> None:
    chosen = RunConfig(channels_last=wanted)
    weights = prepare(convolutional(), chosen, CPU)[0].weight  # type: ignore[index]
    images = InputFormat.of(chosen)(IMAGES)
    for part in (weights, images):
        assert part.is_contiguous(memory_format=torch.channels_last) == wanted
        assert part.is_contiguous() != wanted
    flat = torch.rand(2, 5)
    assert InputFormat.of(chosen)(flat) is flat


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(Precision.PURE_BF16, torch.bfloat16), (Precision.PURE_FP16, torch.float16)],
)
def test_pure_precisions_cast_everything_but_batch_norm_and_integers(
    precision: Precision, dtype: torch.dtype
) -> None:
    chosen = RunConfig(precision=precision)
    conv, norm, _, linear = prepare(convolutional(), chosen, CPU)  # type: ignore[misc]
    assert {p.dtype for p in (*conv.parameters(), *linear.parameters())} == {dtype}
    assert {p.dtype for p in norm.parameters()} == {norm.running_var.dtype} == {torch.float32}
    form = InputFormat.of(chosen)
    assert form(IMAGES).dtype == dtype
    assert form(torch.arange(3)).dtype == torch.int64


# --- process-wide flags ---------------------------------------------------------------------------


def flags() -> tuple[bool | str, ...]:
    return (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("highest", False, False, False, False, False)),
        ({"precision": Precision.TF32}, ("high", True, False, False, False, False)),
        ({"cudnn_benchmark": True}, ("highest", False, True, False, False, False)),
        ({"deterministic": True}, ("highest", False, False, True, True, False)),
    ],
)
def test_flags_follow_the_configuration_and_are_put_back(
    changes: dict[str, Any], expected: tuple[bool | str, ...]
) -> None:
    before = flags()
    with run_flags(replace(RunConfig(), **changes)):
        assert flags() == expected
    assert flags() == before
    with pytest.raises(ZeroDivisionError), run_flags(replace(RunConfig(), **changes)):
        raise ZeroDivisionError
    assert flags() == before
