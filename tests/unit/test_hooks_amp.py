"""Mixed precision under the hooks: the loss is the script's, the scale and the skips are seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.support.fake_live import FakeLive, hooked

SCALE = 1024.0


@pytest.fixture
def live() -> Iterator[FakeLive]:
    with hooked() as live:
        yield live


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


def test_a_model_that_skips_for_ever_makes_few_events(live: FakeLive) -> None:
    w = nn.Parameter(torch.tensor(0.3))
    optimizer, scaling = torch.optim.SGD([w], lr=0.1), scaler()
    for _ in range(12):
        train(optimizer, w * float("inf"), scaling)
    told = [data["skipped"] for kind, _, data in live.recorder.events if kind == "amp_skipped"]
    assert told == [1, 10]
    assert len(live.rows) == 12


def test_a_disabled_scaler_is_nothing(live: FakeLive) -> None:
    w = nn.Parameter(torch.tensor(0.3))
    train(torch.optim.SGD([w], lr=0.1), w * 1, torch.amp.GradScaler("cpu", enabled=False))
    assert live.values("train/amp_scale") == []
    assert live.values("train/loss") == [pytest.approx(0.3)]


def test_accumulation_and_two_losses_at_once(live: FakeLive) -> None:
    w = nn.Parameter(torch.tensor(2.0))
    optimizer, scaling = torch.optim.SGD([w], lr=0.1), scaler()
    for loss in scaling.scale([w * 1, w * 2]):
        loss.backward()
    scaling.step(optimizer)
    assert live.values("train/loss") == [6.0]


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


def test_training_is_the_same_with_and_without() -> None:
    def run() -> list[float]:
        w = nn.Parameter(torch.tensor(0.3))
        optimizer, scaling = torch.optim.Adam([w]), scaler()
        for factor in (1.0, float("inf"), 3.0):
            train(optimizer, w * factor, scaling)
        return [w.item(), scaling.get_scale()]

    bare = run()
    with hooked() as live:
        assert run() == bare
    assert len(live.rows) == 3
