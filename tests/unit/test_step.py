"""The step: equal to the textbook's, clipped by the true norm, no gradients left."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from trainer.config import Precision, RunConfig
from trainer.training.accelerator import RUN_AHEAD, CudaAccelerator
from trainer.training.model import InputFormat, prepare
from trainer.training.precision import autocast, grad_scaler
from trainer.training.step import TrainPhaseTimer, TrainStep


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
        scaler=scaler or grad_scaler(precision, torch.device("cpu")),
        autocast=autocast(precision, torch.device("cpu")),
        max_grad_norm=max_grad_norm,
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
    model = prepare(nn.Linear(4, 2), config, torch.device("cpu"))
    seen: list[torch.dtype] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return nn.functional.mse_loss(outputs, targets)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = replace(make(1.0, precision), model=model, loss=loss, optimizer=optimizer)
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
    step = make(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    before = [p.detach().clone() for p in step.model.parameters()]
    step(torch.full((3, 4), 1e38), BATCH[1])
    for weights, former in zip(step.model.parameters(), before, strict=True):
        assert torch.equal(weights, former)
        assert weights.grad is None
    assert step.scaler.get_scale() == 512.0


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


class Compiled:
    """Like torch.compile's wrapper: `__len__` raises for a model without a length."""

    calls = 0

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self._model(inputs)
        return outputs

    def __len__(self) -> int:
        raise TypeError("Linear does not support len()")


def test_a_compiled_model_without_a_length_takes_the_step() -> None:
    plain = make()
    compiled = Compiled(plain.model)
    replace(plain, wrapped=compiled)(*BATCH)
    assert compiled.calls == 1


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


def test_autocast_acts_only_in_mixed_precision() -> None:
    x = torch.ones(2, 2)
    cpu = torch.device("cpu")
    for precision, expected in [(Precision.FP32, torch.float32), (Precision.BF16, torch.bfloat16)]:
        context = autocast(precision, cpu)
        for _ in range(2):  # the loop enters one context again and again
            with context:
                assert (x @ x).dtype == expected


def test_fp16_has_a_scaler_on_a_cpu_too() -> None:
    scaler = grad_scaler(Precision.FP16, torch.device("cpu"))
    weights = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.5)
    for factor, left, scale in [(1.0, 0.5, 2.0**16), (torch.inf, 0.5, 2.0**15)]:
        optimizer.zero_grad()
        scaler.scale((weights * factor).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        assert (weights.tolist(), scaler.get_scale()) == ([left, left], scale)
