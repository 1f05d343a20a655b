"""What `stepscope watch` records of scripts that print the truth: loops, frameworks, compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.child_process import child
from tests.support.fake_live import hooked
from tests.support.run_values import block_of
from tests.support.watched_scripts import Captured, watch


def micro_sums(captured: Captured) -> list[float]:
    """The losses of the optimizer steps, each of two micro-batches."""
    losses = captured.spoken("micro_loss")
    return [first + second for first, second in zip(losses[::2], losses[1::2], strict=True)]


@pytest.mark.parametrize("framework", ["huggingface", "lightning"])
def test_loss_steps_epochs_samples_rates_and_norms(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if framework == "huggingface" else framework)
    output = [str(tmp_path / "output")] if framework == "huggingface" else []
    captured = watch(tmp_path / "runs", f"capture_{framework}.py", *output)
    assert captured.recorded("train/loss") == micro_sums(captured)
    assert block_of(captured.folder).step.tolist() == [1, 2, 3, 4, 5, 6]
    assert captured.recorded("train/backwards") == [2.0] * 6
    assert captured.recorded("train/epoch") == [1, 1, 1, 2, 2, 2]
    assert captured.run_json["device"] == "cpu"
    assert sum(captured.samples()) <= 48 - 8, "evaluation's batches are not among them"
    waits, times = (captured.recorded(f"perf/{key}")[-5:] for key in ("data_wait", "step_time"))
    assert (np.array(waits) < times).all()
    rates, norms = captured.recorded("train/lr"), captured.recorded("train/grad_norm")
    if framework == "huggingface":
        assert (rates, captured.run_json["optimizers"]) == (captured.spoken("lr"), ["AdamW"])
        assert norms == pytest.approx(captured.spoken("norm"))
    else:
        assert (rates, captured.run_json["optimizers"]) == ([0.1] * 3 + [0.05] * 3, ["Adam"])
        assert len(norms) == 6
        assert not list(Path(__file__).parents[1].joinpath("scripts").glob("lightning_logs"))


def test_epochs_and_samples_of_every_step(tmp_path: Path) -> None:
    """accelerate reads ahead, and evaluation is fetched with gradients on."""
    pytest.importorskip("accelerate")
    captured = watch(tmp_path, "capture_epochs.py")
    assert captured.recorded("train/epoch") == captured.spoken("epoch")
    assert captured.run_json["epoch"] == captured.spoken("epoch")[-1]
    assert captured.samples() == pytest.approx(captured.spoken("samples")[1:])


IMPORT = """
import os, sys
from stepscope.watch import hooks
from tests.support.fake_live import FakeLive
live = FakeLive()
finders = list(sys.meta_path)
hooks.install(live)
assert "torch" not in sys.modules, "torch must not be imported by us"
os.environ["OMP_NUM_THREADS"] = "1"  # counts only before the import
import importlib.util
import torch
assert torch.get_num_threads() == 1
assert type(torch.__spec__.loader).__name__ == "SourceFileLoader"
assert sys.meta_path == finders
assert "torch._dynamo" not in sys.modules, "a second of import time that nobody asked for"
w = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([w], lr=0.1)
(w * 1).backward()
optimizer.step()
print([(step, row["train/loss"], row["train/lr"]) for step, row in live.rows])
"""


def test_the_hooks_wait_for_the_scripts_own_import() -> None:
    assert child(IMPORT) == "[(1, 1.0, 0.1)]\n"


@pytest.mark.filterwarnings("ignore")  # the compiler provokes warnings of torch itself
@pytest.mark.parametrize("what", ["model", "step"])
def test_a_compiled_script_computes_the_same_and_is_seen(what: str) -> None:
    def run() -> list[float]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        forward = torch.compile(model, backend="aot_eager") if what == "model" else model

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        run_step = torch.compile(step, backend="aot_eager") if what == "step" else step
        return [run_step(torch.randn(8, 4)).item() for _ in range(5)]

    bare, graphs = run(), dict(torch._dynamo.utils.counters["stats"])
    with hooked() as live:
        assert run() == bare
    assert live.values("train/loss") == bare
    if not hasattr(torch._C._dynamo.eval_frame, "skip_code"):  # torch 2.6: one small graph more
        assert dict(torch._dynamo.utils.counters["stats"]) == graphs
