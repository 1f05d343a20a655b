"""Each setting of the training step on a GPU: it acts, trains as plain fp32 does, and resumes.

CUDA Graphs, autocast, the loss scale and checkpointing run on the simulator too. The modes of
torch.compile for GPUs do not, and nothing here says how fast anything is.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.gpu.conftest import waiting_raises
from tests.support.run_values import events, metric, run_json
from tests.support.training_runs import refused, save_at_step, start_worker, train
from trainer.config import Precision, RunConfig, Workload, defaults
from trainer.train import TrainLoop, build_train_step
from trainer.training.accelerator import CudaAccelerator
from trainer.training.config_validation import TrainDevice, validate
from trainer.training.cuda_graph_step import capture_step
from trainer.training.loaders import Loader
from trainer.training.model import prepare
from trainer.training.precision import WORKSPACES, run_flags
from trainer.training.state import TrainState
from trainer.workloads.build import WORKLOADS

SAVED = 33  # within the second epoch of 26 steps

# Each setting, with how far its losses may be from those of plain fp32, relative to them: 60 steps
# of Adam make the rounding of another order of sums larger; 16 bits keep two to three digits; Adam
# in pure fp16 divides by more, and so takes other steps.
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "warm-up": ({"kernel_warmup": True, "preallocate_memory": True}, 5e-3),
    "cudnn.benchmark": ({"cudnn_benchmark": True}, 5e-3),
    "activation checkpointing": ({"activation_checkpointing": True}, 5e-3),
    "foreach": ({"optimizer_impl": "foreach"}, 5e-3),
    "gradient_accumulation_steps": ({"batch_size": 128, "gradient_accumulation_steps": 4}, 5e-3),
    "tf32": ({"precision": "tf32"}, 0.05),
    "bf16": ({"precision": "bf16"}, 0.05),
    "fp16": ({"precision": "fp16", "max_grad_norm": 1e6}, 0.05),
    "pure_bf16": ({"precision": "pure_bf16"}, 0.05),
    "pure_fp16": ({"precision": "pure_fp16"}, 0.25),
    "CUDA Graphs": ({"cuda_graphs": True}, 5e-3),
    "CUDA Graphs, fp16, clipping": (
        {"cuda_graphs": True, "precision": "fp16", "max_grad_norm": 1e6},
        0.05,
    ),
}


def cnn(gpu: TrainDevice, **changes: Any) -> RunConfig:
    base = replace(
        defaults(Workload.DIGITS_CNN, gpu.id),
        **{"epochs": 3, "batch_size": 512, "max_steps": 60, "learning_rate": 5e-3, "seed": 3},
    )
    return replace(base, **changes)


@pytest.fixture(scope="module")
def plain(gpu: TrainDevice, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of plain fp32."""
    return train(tmp_path_factory.mktemp("plain"), "run", cnn(gpu))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_trains_as_plain_fp32_and_resumes(
    name: str, plain: np.ndarray, gpu: TrainDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, tolerance = SETTINGS[name]
    config = cnn(gpu, **changes)
    if refused := validate(config, [gpu]):
        pytest.skip(str(refused[0]))
    save_at_step(monkeypatch, SAVED)
    whole = train(tmp_path, "whole", config)
    # In fp16 the first steps overflow and are skipped, until the loss scale fits.
    np.testing.assert_allclose(whole[:2], plain[:2], rtol=min(tolerance, 0.01))
    np.testing.assert_allclose(whole[-10:].mean(), plain[-10:].mean(), rtol=tolerance)
    rest = train(tmp_path, "rest", replace(config, resume_from=f"whole/step-{SAVED}.pt"))
    np.testing.assert_allclose(rest, whole[SAVED:], rtol=0.02)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[torch.cuda.CUDAGraph]:
    """Every graph that is replayed, as often as it is."""
    called: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def count(self: torch.cuda.CUDAGraph) -> None:
        called.append(self)
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    return called


def test_whole_batches_are_replayed_and_the_rest_goes_without_the_graph(
    gpu: TrainDevice, tmp_path: Path, replays: list[torch.cuda.CUDAGraph]
) -> None:
    """Of 12,942 samples an epoch has 25 whole batches of 512 and one of 142."""
    config = cnn(gpu, max_steps=0, epochs=2, optimizer="sgd", max_grad_norm=0.5)
    expected = train(tmp_path, "eager", config)
    assert replays == []
    losses = train(tmp_path, "graphs", replace(config, cuda_graphs=True))
    assert len(replays) == 2 * 25
    assert len(set(replays)) == 1
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for key in ("train/grad_norm", "val/loss"):
        found, wanted = (metric(tmp_path / name, key) for name in ("graphs", "eager"))
        np.testing.assert_allclose(found, wanted, rtol=1e-3)
    texts = [event.text for event in events(tmp_path / "graphs") if event.kind == "cuda_graphs"]
    assert len(texts) == 1
    assert "; the smaller last step of each epoch runs without the graph" in texts[0]


def test_a_graph_follows_the_schedule_and_the_loss_scale(gpu: TrainDevice, tmp_path: Path) -> None:
    """A rate or a scale that was recorded as a number would stay what it was."""
    config = cnn(gpu, max_steps=0, optimizer="sgd", learning_rate=0.2, precision="fp16")
    expected = train(tmp_path, "eager", config)
    losses = train(tmp_path, "graphs", replace(config, cuda_graphs=True))
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    rates, scales = (metric(tmp_path / "graphs", key) for key in ("train/lr", "train/amp_scale"))
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] < 0.1
    assert np.array_equal(scales, metric(tmp_path / "eager", "train/amp_scale"))
    still = train(tmp_path, "still", replace(config, cuda_graphs=True, lr_scheduler="none"))
    assert np.abs(still[26:] - losses[26:]).max() > 1e-4


def test_a_graph_gives_its_memory_back(gpu: TrainDevice, tmp_path: Path) -> None:
    config = cnn(gpu, cuda_graphs=True, max_steps=5)
    train(tmp_path, "first", config)  # pays for what torch keeps for itself
    allocated = torch.cuda.memory_allocated(gpu.cuda_index)
    reserved = torch.cuda.memory_reserved(gpu.cuda_index)
    train(tmp_path, "second", config)
    assert torch.cuda.memory_allocated(gpu.cuda_index) == allocated
    assert torch.cuda.memory_reserved(gpu.cuda_index) == reserved


class Waits(nn.Linear):
    """A model that reads a value back, which no capture can do."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.flatten(1)) * (1 if images.sum().item() else 2)


def test_a_step_that_no_graph_can_hold_is_refused_and_the_next_run_works(
    gpu: TrainDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cnn_task = WORKLOADS[Workload.DIGITS_CNN]
    with_model = lambda config: replace(cnn_task(config), model=Waits(64, 10))  # noqa: E731
    monkeypatch.setitem(WORKLOADS, Workload.DIGITS_CNN, with_model)
    config = cnn(gpu, cuda_graphs=True, max_steps=5)
    reason = refused(tmp_path, "refused", config)
    assert reason.startswith("cuda_graphs: ")
    assert "operation not permitted when stream is capturing" in reason
    monkeypatch.undo()
    train(tmp_path, "next", config)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.PURE_FP16])
def test_replaying_never_waits_for_the_gpu(
    gpu: TrainDevice, compute: CudaAccelerator, precision: Precision
) -> None:
    config = cnn(gpu, precision=precision, max_grad_norm=1.0, cuda_graphs=True)
    with run_flags(config):
        task = WORKLOADS[config.workload](config)
        training = TrainState(config, prepare(task.model, config, compute.device), compute)
        recorder: Any = SimpleNamespace(event=lambda *_, **__: None)
        train_batch = build_train_step(training, task).train_batch
        captured = capture_step(train_batch, training, task.train, recorder)
        batches = Loader(task.train, config, compute).batches(training.order(task.train.length))
        with ExitStack() as watched:
            for number, batch in enumerate(batches, 1):
                if number == 5:
                    watched.enter_context(waiting_raises())
                captured(*batch)
                compute.pace()
                training.optimizer.param_groups[0]["lr"] *= 0.9  # a schedule's work


def test_memory_warm_up_leaves_the_driver_nothing_to_give(
    gpu: TrainDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    loop = TrainLoop.train

    def count(self: TrainLoop) -> None:
        asked.append(torch.cuda.memory_stats(gpu.cuda_index)["num_device_alloc"])
        loop(self)
        asked.append(torch.cuda.memory_stats(gpu.cuda_index)["num_device_alloc"])

    monkeypatch.setattr(TrainLoop, "train", count)
    config = cnn(gpu, max_steps=0, epochs=1)
    expected = train(tmp_path, "without", config)
    losses = train(tmp_path, "with", replace(config, preallocate_memory=True))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert asked[1] > asked[0]
    assert asked[3] == asked[2]
    event = next(event for event in events(tmp_path / "with") if event.kind == "memory_warmup")
    before, after = event.data["before"], event.data["after"]
    assert after["memory/reserved"] >= before["memory/reserved"], "tests before may have left some"


def test_deterministic_comes_too_late_in_a_process_that_has_used_the_gpu(
    gpu: TrainDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.zeros(1, device=f"cuda:{gpu.cuda_index}")
    monkeypatch.delenv(WORKSPACES, raising=False)
    reason = refused(tmp_path, "run", cnn(gpu, deterministic=True))
    assert reason.startswith("deterministic: cuBLAS needs CUBLAS_WORKSPACE_CONFIG=:4096:8")
    assert "Choose the process runner" in reason


def test_deterministic_in_a_process_of_its_own_gives_the_same_losses_twice(
    gpu: TrainDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKSPACES, raising=False)
    config = cnn(gpu, deterministic=True, max_steps=10, num_threads=1)
    losses = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with start_worker(config, tmp_path / name) as process:
            assert process.wait(100) == 0
        assert run_json(tmp_path / name)["status"] == "finished", run_json(tmp_path / name)
        losses.append(metric(tmp_path / name, "train/loss"))
    assert np.array_equal(*losses)
