"""torch.compile on the CPU, for real: one model through its C++ compiler.

Its modes for GPUs need Triton, which the simulator has not: they are not verified anywhere yet.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.run_values import events, metric
from tests.support.training_runs import refused, small, train
from trainer.config import CompileMode, Workload
from trainer.train import TrainLoop
from trainer.training.checkpoint import read_checkpoint
from trainer.training.config_validation import choice_problem
from trainer.training.devices import list_devices

# Torch's own, as it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MLP = small(Workload.DIGITS_MLP, batch_size=512, epochs=2, max_steps=30)  # 26 steps an epoch
COMPILED = replace(MLP, compile_mode=CompileMode.DEFAULT)


@pytest.mark.timeout(400)
def test_a_compiled_model_trains_as_the_plain_one_and_keeps_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = choice_problem("compile_mode", "default", MLP, list_devices())
    if problem is not None:
        pytest.skip(str(problem))
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    built: list[int] = []
    loop = TrainLoop.train

    def count(self: TrainLoop) -> None:
        built.append(len([*cache.rglob("*.so")]))
        loop(self)
        built.append(len([*cache.rglob("*.so")]))

    monkeypatch.setattr(TrainLoop, "train", count)
    plain = train(tmp_path, "plain", MLP)
    assert built == [0, 0]
    compiled = train(tmp_path, "compiled", COMPILED)
    # Kernels of the forward and the backward pass, before the first step.
    assert built[2] > 1
    assert built[3] == built[2]
    np.testing.assert_allclose(compiled, plain, rtol=1e-4)
    first, last = (event for event in events(tmp_path / "compiled") if event.kind == "compile")
    assert first.step == 0
    assert last.data["seconds"] > metric(tmp_path / "compiled", "perf/step_time").max()
    names = [
        read_checkpoint(tmp_path / name / "last.pt")["model"] for name in ("plain", "compiled")
    ]
    assert names[0].keys() == names[1].keys()


def test_one_static_graph_is_compiled_and_serves_the_full_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second size of batch would have Dynamo make the graph of all batches dynamic."""
    sizes: list[torch.Size] = []
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Any:
        assert not any(isinstance(one, torch.SymInt) for one in examples)
        sizes.append(examples[0].shape)

        def call(*inputs: torch.Tensor) -> Any:
            calls.append(len(inputs[0]))
            return graph(*inputs)

        return call

    expected = train(tmp_path, "plain", MLP)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    losses = train(tmp_path, "compiled", COMPILED)
    np.testing.assert_array_equal(losses, expected)
    assert [size[0] for size in sizes] == [512]
    # All but the last step of the epoch, and the one before the first that counts.
    assert calls == [512] * len(losses)


def test_a_model_that_cannot_be_compiled_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ValueError("no kernel")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    reason = refused(tmp_path, "run", COMPILED)
    assert reason.startswith("compile_mode: ")
    assert "ValueError: no kernel" in reason
    assert not (tmp_path / "run" / "traceback.txt").exists()
