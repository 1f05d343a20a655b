"""The setting fp16: the results of GradScaler, and true gradients in the script's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepscope.settings import parse
from stepscope.settings.autocast import Fp16
from stepscope.settings.setting import Training
from stepscope.watch import main as watch
from stepscope.watch.trial import TRIAL
from tests.support.applied_settings import Applied, applied

STEPS, ACCUMULATED = 8, 2
FACTOR = 4.0


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the setting on the CPU, where torch has the same operations."""
    monkeypatch.setattr(Fp16, "devices", ("cpu",))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def batches() -> Iterator[Tensor]:
    torch.manual_seed(1)
    yield from torch.randn(STEPS * ACCUMULATED, 8, 4)


class Script:
    """Accumulates, reads and clips gradients; `scaler` is None in a script in float32.

    The first losses are too large for the initial scale, so that steps are skipped.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, *, set_to_none: bool) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for number, batch in enumerate(batches()):
            forward: AbstractContextManager[Any] = nullcontext()
            if scaler is not None:
                forward = torch.autocast("cpu", dtype=torch.float16)
            with forward:
                loss = model(batch).pow(2).mean() * FACTOR
            (loss if scaler is None else scaler.scale(loss)).backward()
            self.losses.append(loss.item())
            if number % ACCUMULATED != ACCUMULATED - 1:
                continue
            if scaler is not None:
                scaler.unscale_(optimizer)
            self.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
        self.weights = [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_fp16_equals_a_grad_scaler_by_hand(set_to_none: bool) -> None:
    by_hand = Script(torch.amp.GradScaler("cpu"), set_to_none=set_to_none)
    assert not all(torch.tensor(by_hand.norms).isfinite()), "steps are skipped"
    assert torch.tensor(by_hand.norms[-1]).isfinite()
    in_float32 = Script(None, set_to_none=set_to_none)
    assert in_float32.losses != by_hand.losses
    with applied("fp16") as found:
        script = Script(None, set_to_none=set_to_none)
        assert script.losses == by_hand.losses
        assert str(script.norms) == str(by_hand.norms), "inf and NaN are as by hand"
        assert all(map(torch.equal, script.weights, by_hand.weights))
        skipped = sum(not torch.tensor(norm).isfinite() for norm in script.norms)
        assert found["fp16"]["state"] == "in effect", found["fp16"]["text"]
        assert f"{skipped} of {STEPS} steps were skipped" in found["fp16"]["text"]
        assert f"scale is {65536 / 2**skipped:g};" in found["fp16"]["text"]
        _, first = found.live.recorder.rows[0][:2]
        assert first["train/loss"] == by_hand.losses[0] + by_hand.losses[1]


def test_gradients_of_one_pass_are_unscaled() -> None:
    with applied("fp16"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).float().pow(2).mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    model = network()
    model(torch.ones(2, 4)).float().pow(2).mean().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient == pytest.approx(parameter.grad, rel=0.01, abs=1e-4)


def backward(loss: Any, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()


def differentiate_twice(loss: Any, optimizer: torch.optim.Optimizer) -> None:
    loss.backward(create_graph=True)
    optimizer.step()


def step_with_a_closure(loss: Any, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        return 0.0

    loss.backward()
    optimizer.step(closure)


def train(found: Applied, end: Callable[[Any, torch.optim.Optimizer], None]) -> list[Any]:
    """Train one step in the setting, and one that ends with `end`."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtypes = []
    for one in (backward, end):
        output = model(torch.ones(2, 4))
        dtypes.append(output.dtype)
        optimizer.zero_grad()
        one(output.float().pow(2).mean(), optimizer)
    return dtypes


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("end", "reason"), [(differentiate_twice, "create_graph"), (step_with_a_closure, "closure")]
)
def test_fp16_is_refused_for_what_it_cannot_scale_or_skip(
    end: Callable[[Any, torch.optim.Optimizer], None], reason: str
) -> None:
    with applied("fp16") as found:
        assert train(found, end) == [torch.float16] * 2
        assert found["fp16"]["state"] == "refused"
        assert reason in found["fp16"]["text"]


def test_a_training_with_fp16_is_refused_and_a_trial_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        watch.main(["--with", "tf32 fp16", "train.py"])
    assert refused.value.code == 2
    assert "scaler.scale(loss).backward()" in capsys.readouterr().err
    monkeypatch.setenv(TRIAL, "{}")
    assert watch.main(["--with", "fp16", "no_such_script.py"]) != 0
    assert "no_such_script.py" in capsys.readouterr().err


def test_reentrant_checkpoints_are_scaled_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, batch: Tensor) -> Any:
            hidden = self.net[0](batch)
            return checkpoint(self.net[1:], hidden, use_reentrant=True)

    def gradients() -> list[Tensor]:
        model = Checkpointed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).float().pow(2).mean().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        return found

    plain = gradients()
    with applied("fp16") as found:
        for one, other in zip(gradients(), plain, strict=True):
            assert one == pytest.approx(other, rel=0.02, abs=1e-3)
        assert found["fp16"]["state"] == "in effect"


def test_fp16_is_refused_where_it_cannot_act(monkeypatch: pytest.MonkeyPatch) -> None:
    [setting] = parse(["fp16"])
    model, sparse = network(), nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, sparse)]
    cpu = torch.device("cpu")
    assert setting.problem(Training(cpu, model, (optimizers[0],))) is None
    assert "Sparse" in (setting.problem(Training(cpu, sparse, (optimizers[1],))) or "")
    assert "optimizers" in (setting.problem(Training(cpu, model, tuple(optimizers))) or "")
    monkeypatch.undo()
    assert "bf16" in (setting.problem(Training(cpu, model, (optimizers[0],))) or "")


def test_only_one_autocast_is_applied() -> None:
    with applied("bf16 fp16") as found:
        assert train(found, backward) == [torch.bfloat16] * 2
        assert found.states() == {"bf16": "in effect", "fp16": "refused"}
