"""Several optimizers at a time, and mixed precision: losses, norms, scales and skipped steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from stepscope.memory.model_states import StorageBytes
from stepscope.watch.hooks import attribution as attribution_module
from stepscope.watch.hooks.attribution import LossAttribution
from tests.support.fake_live import FakeLive, hooked


@pytest.fixture
def live() -> Iterator[FakeLive]:
    with hooked() as live:
        yield live


class Pair:
    """An actor and a critic, each with an optimizer of its own."""

    def __init__(self) -> None:
        self.actor, self.critic = (nn.Parameter(torch.tensor(value)) for value in (2.0, 5.0))
        self.actor_optimizer = torch.optim.SGD([self.actor], lr=0.0)
        self.critic_optimizer = torch.optim.SGD([self.critic], lr=0.0)

    def step(self) -> None:
        self.actor_optimizer.step()
        self.critic_optimizer.step()


@pytest.mark.parametrize("zero_first", [False, True])
def test_zero_grad_of_one_keeps_the_loss_of_the_other(live: FakeLive, zero_first: bool) -> None:
    pair = Pair()
    for _ in range(3):
        pair.actor_optimizer.zero_grad()
        if zero_first:
            pair.critic_optimizer.zero_grad()
        (pair.actor * 1).backward()
        if not zero_first:
            pair.critic_optimizer.zero_grad()
        (pair.critic * 1).backward()
        pair.step()
    assert live.values("train/loss") == [2.0] * 3
    assert live.values("train/loss.optimizer1") == [5.0] * 3
    assert live.values("train/backwards") == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gan_whose_generator_steps_last(live: FakeLive, set_to_none: bool) -> None:
    """Its loss reaches the gradients of the critic too, which are cleared before it is used."""
    pair = Pair()
    for _ in range(3):
        pair.actor_optimizer.zero_grad(set_to_none)
        (pair.actor * pair.critic).backward()
        pair.critic_optimizer.zero_grad(set_to_none)
        (pair.critic * 3).backward()
        pair.critic_optimizer.step()
        pair.actor_optimizer.step()
    assert live.recorder.run_json["optimizers"] == ["SGD", "SGD"]
    assert live.values("train/loss") == [15.0] * 3, "the critic stepped first and is optimizer 0"
    assert live.values("train/loss.optimizer1") == [10.0] * 3


def test_a_joint_loss_is_the_first_ones(live: FakeLive) -> None:
    pair = Pair()
    for _ in range(2):
        (pair.actor + pair.critic).backward()
        (pair.actor + pair.critic).backward()
        pair.step()
    assert live.values("train/loss") == [14.0] * 2
    assert live.values("train/backwards") == [2.0] * 2
    assert live.values("train/loss.optimizer1") == []


def parts(*values: float) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(())) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_clipping_the_same_again_takes_its_place(live: FakeLive) -> None:
    first, second = parts(3.0, 4.0)
    optimizer = torch.optim.SGD([first, second], lr=0.0)
    (first * 0).backward()
    nn.utils.clip_grad_norm_(first, 1.0)
    nn.utils.clip_grad_norm_(second, 1.0)
    norm = nn.utils.clip_grad_norm_((p for p in [first, second]), 0.1)
    optimizer.step()
    assert live.values("train/grad_norm") == [norm.item()]
    nn.utils.clip_grad_norm_(first, 1.0)
    nn.utils.clip_grad_norm_(second, 1.0)
    optimizer.step()
    assert len(live.values("train/grad_norm")) == 1, "norms of parts have no total"


def test_each_optimizer_has_the_norm_of_its_own(live: FakeLive) -> None:
    pair = Pair()
    for _ in range(2):
        for optimizer in (pair.actor_optimizer, pair.critic_optimizer):
            optimizer.zero_grad()
        (pair.actor * 3).backward()
        (pair.critic * 4).backward()
        nn.utils.clip_grad_norm_([pair.actor], 1.0)
        nn.utils.clip_grad_norm_([pair.critic], 1.0)
        pair.step()
    assert live.values("train/grad_norm") == [3.0] * 2
    assert live.values("train/grad_norm.optimizer1") == [4.0] * 2


SCALE = 1024.0


def scaler(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=SCALE)


def train(optimizer: torch.optim.Optimizer, loss: Tensor, scaler: torch.amp.GradScaler) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_skipped_step_leaves_a_row_but_counts_no_step(live: FakeLive) -> None:
    w = nn.Parameter(torch.tensor(0.3))
    optimizer, scaling = torch.optim.SGD([w], lr=0.1), scaler()
    for factor in (1.0, float("inf"), 1.0):
        train(optimizer, w * factor, scaling)
    assert [step for step, _ in live.rows] == [1, 1, 2]
    assert live.rows[1][1] == {"train/amp_scale": SCALE, "train/amp_skipped": 1.0}
    assert live.values("train/amp_skipped") == [0.0, 1.0, 1.0]
    assert live.values("train/amp_scale") == [SCALE, SCALE, SCALE / 2]
    assert live.values("train/loss") == pytest.approx([0.3, 0.2]), "unscaled, without the skipped"
    assert live.boundaries == 3, "commands act at a skipped step too"
    for _ in range(11):
        train(optimizer, w * float("inf"), scaling)
    events = [data["skipped"] for kind, _, data in live.recorder.events if kind == "amp_skipped"]
    assert events == [1, 10], "a model that skips for ever makes few events"


def test_a_disabled_scaler_is_nothing_and_two_losses_are_one(live: FakeLive) -> None:
    w = nn.Parameter(torch.tensor(2.0))
    optimizer, scaling = torch.optim.SGD([w], lr=0.0), scaler()
    train(optimizer, w * 1, torch.amp.GradScaler("cpu", enabled=False))
    assert live.values("train/amp_scale") == []
    for loss in scaling.scale([w * 1, w * 2]):
        loss.backward()
    scaling.step(optimizer)
    assert live.values("train/loss") == [2.0, 6.0]


def test_a_scaler_that_scales_by_itself_gives_no_loss_rather_than_a_wrong_one(
    live: FakeLive,
) -> None:
    class Sharded(torch.amp.GradScaler):
        def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
            self._lazy_init_scale_growth_tracker(outputs.device)
            return outputs * self._scale

    w = nn.Parameter(torch.tensor(2.0))
    train(torch.optim.SGD([w], lr=0.1), w * 1, scaler(Sharded))
    assert live.values("train/loss") == []
    assert live.values("train/amp_scale") == [SCALE]


def test_memory_of_optimizers_that_stepped_before_another_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of an earlier model that is kept; what both optimizers have counts for the newer one."""
    on_host = lambda index, other=None: StorageBytes(None, other)  # noqa: E731
    monkeypatch.setattr(attribution_module, "StorageBytes", on_host)
    attribution = LossAttribution()
    shared, own = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(1000))
    first = torch.optim.SGD([shared, own], lr=0.1)
    attribution.register(first)
    attribution.stepped(first)
    assert attribution.earlier_bytes(0) == 0
    second = torch.optim.SGD([shared], lr=0.1)
    attribution.register(second)
    assert attribution.earlier_bytes(0) == 4 * 1000
    attribution.stepped(first)  # they take turns
    assert attribution.earlier_bytes(0) == 0
