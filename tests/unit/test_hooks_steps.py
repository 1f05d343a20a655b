"""What a step of a watched script leaves: its loss, rates, norm and times, per optimizer."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepscope.watch.hooks.optimizer import MAX_GROUPS, MAX_OPTIMIZERS
from tests.support.fake_live import FakeLive, hooked
from tests.support.fake_nvml import FakeClock


@pytest.fixture
def live() -> Iterator[FakeLive]:
    with hooked() as live:
        yield live


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def sgd(*parameters: nn.Parameter, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr)


def train(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_each_step_is_a_row_with_its_loss_and_rate(live: FakeLive) -> None:
    w = weight()
    optimizer = sgd(w)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for _ in range(3):
        losses.append(train(optimizer, (w * 0.3) ** 2))
        scheduler.step()
    assert [step for step, _ in live.rows] == [1, 2, 3]
    assert live.values("train/loss") == losses
    assert live.values("train/lr") == pytest.approx([0.1, 0.05, 0.025])
    phases = {"perf/forward", "perf/backward", "perf/optimizer"}
    assert live.rows[1][1].keys() == {"train/loss", "train/lr", "perf/step_time"} | phases
    assert live.boundaries == 3


# torch 2.8 warns of its own LBFGS
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_zero_grad_drops_what_was_added_before(live: FakeLive) -> None:
    """Closures that LBFGS calls many times, and SAM's two passes, count once."""
    w = weight(3.0)
    optimizer = torch.optim.LBFGS([w], lr=0.1, max_iter=4)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w - 1) ** 2
        loss.backward()
        seen.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(seen) > 1
    assert live.values("train/loss") == [seen[-1]]


def test_zero_grad_of_the_module_drops_the_loss_of_an_optimizer_of_its_parameters(
    live: FakeLive,
) -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = sgd(*model.parameters())
    for module, factor in ((model, 1.0), (other, 2.0), (model, 1.0)):
        (model.bias * 0 + 1).sum().backward()
        module.zero_grad()  # as for an outlier, whose gradients are not used
        (model.bias * 0 + 1).sum().backward()
        optimizer.step()
        assert live.rows[-1][1]["train/loss"] == factor


def test_zero_grad_of_a_module_can_be_compiled_into_one_graph(live: FakeLive) -> None:
    model = nn.Linear(1, 1)

    def clear(inputs: Tensor) -> Tensor:
        model.zero_grad()
        return inputs + 1

    compiled = torch.compile(clear, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2


def micro_batches(w: Tensor) -> None:
    for micro in (0.5, 1.5):
        ((w * micro) / 2).backward()


def direct_and_list(w: Tensor) -> None:
    torch.autograd.backward(w * 1)
    torch.autograd.backward([w * 2])


def nested(w: Tensor) -> None:
    checkpoint(lambda x: x * 4, w, use_reentrant=True).backward()


def no_scalar(w: Tensor) -> None:
    (w * torch.ones(2)).backward(torch.ones(2))


def failed(w: Tensor) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.tensor(5.0).backward()


@pytest.mark.parametrize(
    ("train", "losses", "backwards"),
    [
        (micro_batches, [2.0, 1.0], [2.0]),
        (lambda w: (w * 3).backward(torch.tensor(-1.0)), [-6.0, 1.0], []),
        (direct_and_list, [6.0, 1.0], [2.0]),
        (nested, [8.0, 1.0], []),
        (no_scalar, [1.0], []),
        (failed, [1.0], []),
    ],
)
def test_the_loss_of_a_step_is_the_sum_of_its_outermost_backwards(
    live: FakeLive, train: Callable[[Tensor], None], losses: list[float], backwards: list[float]
) -> None:
    w = weight(2.0)
    optimizer = sgd(w)
    train(w)
    optimizer.step()
    (w * 0 + 1.0).backward()
    optimizer.step()
    assert live.values("train/loss") == losses
    assert live.values("train/backwards") == backwards
    assert len(live.rows) == 2


def test_every_group_has_its_rate_and_no_more_than_the_limit(live: FakeLive) -> None:
    groups: list[dict[str, Any]] = [
        {"params": [weight()], "lr": float(i + 1)} for i in range(MAX_GROUPS + 2)
    ]
    groups[1]["lr"] = torch.tensor(0.25)
    torch.optim.Adam(groups).step()
    row = live.rows[0][1]
    assert row["train/lr"] == 1.0
    assert row["train/lr.group1"] == 0.25
    assert sum(key.startswith("train/lr") for key in row) == MAX_GROUPS


def test_clipping_gives_the_norm_under_both_names(live: FakeLive) -> None:
    w = weight(3.0)
    optimizer = sgd(w)
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_):
        optimizer.zero_grad()
        (w**2).backward()
        returned = clip([w], 0.5)
        assert w.grad is not None
        assert w.grad.item() == pytest.approx(0.5)
        optimizer.step()
        assert live.values("train/grad_norm")[-1] == returned.item()
    optimizer.step()
    assert len(live.values("train/grad_norm")) == 2


def test_two_optimizers_share_the_counter_and_not_the_keys(live: FakeLive) -> None:
    """A GAN whose critic makes two steps for each of its generator."""
    critic, generator = weight(2.0), weight(5.0)
    steps = {"critic": sgd(critic), "generator": torch.optim.Adam([generator])}
    for _ in range(2):
        train(steps["critic"], critic * 1)
        train(steps["critic"], critic * 1)
        train(steps["generator"], generator * 1)
    assert [step for step, _ in live.rows] == [1, 2, 2, 3, 4, 4]
    assert live.values("train/lr.optimizer1") == [0.001, 0.001]
    timed = ["perf/step_time" in row for _, row in live.rows]
    assert timed == [False, True, False, True, True, False]


def test_an_optimizer_may_replace_a_deleted_one(live: FakeLive) -> None:
    gc.disable()
    try:
        for _ in range(3):  # folds of a cross-validation
            w = weight()
            optimizer = sgd(w)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
            for _ in range(15):
                train(optimizer, w * 1)
                scheduler.step()
    finally:
        gc.enable()
    assert [step for step, _ in live.rows] == list(range(1, 46))
    assert len(live.values("train/loss")) == 45


def test_the_optimizer_inside_another_is_not_a_second_one(live: FakeLive) -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    w = weight()
    optimizer = Lookahead(sgd(w))
    for _ in range(2):
        train(optimizer, w * 1)
    assert [step for step, _ in live.rows] == [1, 2]
    assert live.recorder.run_json["optimizers"] == ["Lookahead"]
    assert live.values("train/loss")[0] == 1.0


def test_optimizers_beyond_the_limit_are_left_out(live: FakeLive) -> None:
    for optimizer in [sgd(weight()) for _ in range(MAX_OPTIMIZERS + 2)]:
        optimizer.step()
    assert len(live.recorder.run_json["optimizers"]) == len(live.rows) == MAX_OPTIMIZERS


def test_step_time_leaves_out_what_the_boundary_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    with hooked() as live:
        w = weight()
        optimizer = sgd(w)

        def pause() -> float:
            clock.spend(60.0)
            return 60.0

        live.serve = pause
        for _ in range(3):
            clock.spend(2.0)
            train(optimizer, w * 1)
    assert live.values("perf/step_time") == [2.0, 2.0]


def test_a_hook_that_fails_says_so_once_and_training_goes_on(
    live: FakeLive, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(type(live.recorder), "describe", broken)
    w = weight()
    optimizer = sgd(w)
    for _ in range(3):
        train(optimizer, w * 1)
    assert w.item() == pytest.approx(0.7)
    assert live.rows == []
    (warning,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    lost = "all training metrics will be missing from here on (ValueError: no)"
    assert warning == f"stepscope: {lost}"


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_another_thread_that_trains_too_is_ignored(live: FakeLive) -> None:
    w, other = weight(), weight(9.0)
    optimizer = sgd(w)
    train(optimizer, w * 1)
    (w * 1).backward()
    in_thread(lambda: train(sgd(other), other * 1))
    optimizer.step()
    assert live.values("train/loss") == [1.0, pytest.approx(0.9)]


def test_training_may_move_to_a_thread_and_from_there_to_the_next(live: FakeLive) -> None:
    w = weight()
    (w * 1).backward()  # a trial in the main thread settles nothing
    optimizer = sgd(w)
    for _ in range(2):
        in_thread(lambda: train(optimizer, w * 1))
    assert len(live.rows) == 2
