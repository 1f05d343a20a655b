"""The step: equal to the textbook's, clipped by the true norm; its model and its flags."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.backends import cudnn

from trainer.config import Precision, RunConfig
from trainer.train import TrainStep
from trainer.training.accelerator import RUN_AHEAD, CudaAccelerator
from trainer.training.model import InputFormat, prepare
from trainer.training.precision import autocast, grad_scaler, run_flags
from trainer.training.rank_info import TrainPhaseTimer

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
        form=InputFormat(),
        set_to_none=True,
        wrapped=model,
        no_sync=nullcontext,
    )


BATCH = (torch.ones(3, 4), torch.full((3, 2), 5.0))


def assert_equal_weights(ours: TrainStep, theirs: TrainStep) -> None:
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (5,)])
def test_accumulated_batches_make_the_step_of_one_large_batch(
    sizes: tuple[int, ...], max_grad_norm: float
) -> None:
    inputs, targets = torch.rand(sum(sizes), 4), torch.rand(sum(sizes), 2)
    step, whole = make(max_grad_norm), make()
    expected = whole.loss(whole.model(inputs), targets)
    expected.backward()
    expected_norm = nn.utils.clip_grad_norm_(whole.model.parameters(), max_grad_norm or 1e9)
    whole.optimizer.step()
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
    norm = norms[-1]
    if max_grad_norm:
        assert norm is not None
        assert expected_norm > max_grad_norm
        assert norm.item() == pytest.approx(expected_norm.item(), rel=1e-6)
    else:
        assert norm is None
    assert_equal_weights(step, whole)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_freed_or_filled_with_zeros(set_to_none: bool) -> None:
    step = replace(make(), set_to_none=set_to_none)
    step(*BATCH)
    grads = [weights.grad for weights in step.model.parameters()]
    if set_to_none:
        assert grads == [None, None]
    else:
        assert all(grad is not None and not grad.any() for grad in grads)


def test_the_limit_is_meant_for_the_gradients_without_the_loss_scale() -> None:
    scaled = make(max_grad_norm=0.01, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    plain = make(max_grad_norm=0.01)
    _, norm = scaled(*BATCH)
    _, true_norm = plain(*BATCH)
    torch.testing.assert_close(norm, true_norm)
    assert_equal_weights(scaled, plain)


def test_a_step_with_infinite_gradients_is_skipped_and_the_scale_halved() -> None:
    step = make(precision=Precision.FP16)
    step(torch.full((3, 4), 1e38), BATCH[1])
    assert_equal_weights(step, make())
    assert all(weights.grad is None for weights in step.model.parameters())
    assert step.scaler.get_scale() == 2.0**15


def test_in_a_job_the_times_of_its_parts_are_taken_over_all_batches() -> None:
    phases = TrainPhaseTimer(nn.Linear(1, 1))
    step = replace(make(), phases=phases)
    step(*BATCH, 6, False)
    step(*BATCH, 6, True)
    row = phases.take()
    assert set(row) == {"perf/forward", "perf/backward", "perf/optimizer"}
    times = [value for value in row.values() if value is not None]
    assert all(value > 0 for value in times)
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


PURE = [(Precision.PURE_BF16, torch.bfloat16), (Precision.PURE_FP16, torch.float16)]


@pytest.mark.parametrize(("precision", "dtype"), PURE)
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


def test_pure_precisions_take_the_loss_in_fp32() -> None:
    seen: list[torch.dtype] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return nn.functional.mse_loss(outputs, targets)

    step = replace(make(1.0, Precision.PURE_BF16), loss=loss)
    step.model.bfloat16()
    step = replace(step, form=InputFormat.of(RunConfig(precision=Precision.PURE_BF16)))
    value, _ = step(*BATCH)
    outputs, _ = step.evaluate(*BATCH)
    assert {*seen, value.dtype, outputs.dtype} == {torch.float32}
    assert step.model.weight.dtype == torch.bfloat16


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
    with suppress(ZeroDivisionError), run_flags(replace(RunConfig(), **changes)):
        assert flags() == expected
        raise ZeroDivisionError
    assert flags() == before
