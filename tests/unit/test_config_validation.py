"""Combinations of settings: the fields with an issue, by device, workload and strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.train_devices import CPU_DEVICE as CPU
from tests.support.train_devices import gpu
from trainer.config import SETTINGS, Precision, RunConfig, Runner, Strategy, Workload, defaults
from trainer.training.config_validation import TrainDevice, choice_problem, step_sentence, validate

GPU = gpu()
GPUS = [GPU, replace(GPU, id="GPU-1", cuda_index=1)]
BROKEN = replace(GPU, id="GPU-9", cuda_index=9, reason="its kernels are missing")
CNN, MLP, IMAGES = Workload.DIGITS_CNN, Workload.DIGITS_MLP, Workload.IMAGES
NONE, DP, DDP, FSDP = Strategy.NONE, Strategy.DP, Strategy.DDP, Strategy.FSDP
GRAPHS: dict[str, Any] = {"cuda_graphs": True}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}
SGD: dict[str, Any] = {"optimizer": "sgd"}


def found(device: TrainDevice, workload: Workload = CNN, **changes: Any) -> set[str]:
    """Return the fields with an issue, each of which has a reason and a remedy."""
    issues = validate(replace(defaults(workload, device.id), **changes), [device])
    assert all(issue.reason and issue.remedy for issue in issues)
    return {issue.field for issue in issues}


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_defaults_have_no_problem(device: TrainDevice) -> None:
    assert not any(found(device, workload) for workload in Workload)


ON_CPU: list[tuple[dict[str, Any], str]] = [
    *(({field: True}, field) for field in ("cuda_graphs", "cudnn_benchmark", "pin_memory")),
    *(({field: True}, field) for field in ("preallocate_memory", "non_blocking", "copy_stream")),
    ({"dataset_on_device": True}, "dataset_on_device"),
    *(({"precision": precision}, "precision") for precision in ("pure_fp16", "tf32")),
    *(({"precision": precision}, "") for precision in ("pure_bf16", "bf16", "fp16")),
    ({"precision": "pure_bf16"} | SGD, "precision optimizer optimizer_impl"),
    ({"compile_mode": "reduce-overhead"}, "compile_mode"),
    ({"workload": MLP, "channels_last": True}, "channels_last"),
    ({"deterministic": True, "kernel_warmup": True, "max_grad_norm": 1.0}, ""),
]
ON_GPU: list[tuple[dict[str, Any], str]] = [
    (GRAPHS | {"precision": "fp16", "max_grad_norm": 1.0}, ""),
    (GRAPHS | {"gradient_accumulation_steps": 2}, "cuda_graphs gradient_accumulation_steps"),
    (GRAPHS | {"optimizer_impl": "for-loop"}, "cuda_graphs optimizer_impl"),
    (GRAPHS | {"kernel_warmup": True}, "cuda_graphs kernel_warmup"),
    ({"cudnn_benchmark": True, "deterministic": True}, "cudnn_benchmark deterministic"),
    ({"pin_memory": False}, "non_blocking"),
    ({"workload": IMAGES, "dataset_on_device": True}, "dataset_on_device"),
    ({"workload": MLP, "cudnn_benchmark": True}, "cudnn_benchmark"),
    ({"cudnn_benchmark": True, "dataset_on_device": True, "copy_stream": False}, ""),
    ({"pin_memory": False, "non_blocking": False, "copy_stream": True}, "copy_stream"),
    ({"dataset_on_device": True, "num_workers": 2}, "dataset_on_device num_workers"),
]


@pytest.mark.parametrize(
    ("device", "changes", "fields"),
    [*((CPU, *row) for row in ON_CPU), *((GPU, *row) for row in ON_GPU)],
)
def test_combinations(device: TrainDevice, changes: dict[str, Any], fields: str) -> None:
    assert found(device, **changes) == set(fields.split())


ON = {"compile_mode": "default", "num_workers": 2}
PAIRS = [
    ("deterministic", "cudnn_benchmark"),
    ("compile_mode", "activation_checkpointing"),
    ("compile_mode", "cuda_graphs"),
    ("activation_checkpointing", "cuda_graphs"),
    ("dataset_on_device", "copy_stream"),
]


@pytest.mark.parametrize(("one", "other"), [*PAIRS, *(pair[::-1] for pair in PAIRS)])
def test_of_two_that_exclude_each_other_either_can_be_switched_off(one: str, other: str) -> None:
    config = replace(defaults(CNN, GPU.id), **{one: ON.get(one, True)})
    problem = choice_problem(other, ON.get(other, True), config, [GPU])
    assert problem is not None
    assert problem.remedy == f"Switch off {SETTINGS[one].label}"
    assert choice_problem(other, ON.get(other, True), defaults(CNN, GPU.id), [GPU]) is None


def test_a_missing_compiler_is_named() -> None:
    lacking = [replace(GPU, compile_reason="there is no g++ on this machine"), GPUS[1]]
    config = defaults(CNN, GPU.id)
    problem = choice_problem("compile_mode", "default", config, lacking)
    assert problem is not None
    assert "g++" in problem.reason
    assert choice_problem("compile_mode", "none", config, lacking) is None


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), "tf32 bf16 pure_bf16"), ((8, 0), "")])
def test_precision_needs_its_hardware(capability: tuple[int, int], refused: str) -> None:
    old = gpu(capability)
    assert {p for p in Precision if found(old, precision=p)} == set(refused.split())


def test_unknown_and_unusable_devices_are_refused() -> None:
    config = defaults(CNN, GPU.id)
    assert "this machine has no device" in validate(config, [CPU])[0].reason
    assert validate(config, [gpu(reason="built for others")])[0].reason == "built for others"
    problem = choice_problem("batch_size", 0, RunConfig(), [CPU])
    assert problem is not None
    assert problem.field == "batch_size"


def job(strategy: Strategy, device: str = GPU.id, **changes: Any) -> RunConfig:
    runner = Runner.TORCHRUN if strategy in (DDP, FSDP) else Runner.THREAD
    settings = {"strategy": strategy, "runner": runner, "devices_per_node": 2, **changes}
    return replace(defaults(CNN, device), **settings)


JOBS: list[tuple[RunConfig, dict[str, str]]] = [
    *((job(strategy, device), {}) for strategy in (DDP, FSDP) for device in ("cpu", GPU.id)),
    (job(DDP, devices_per_node=3), {"devices_per_node": "PyTorch can use 2 here."}),
    (job(FSDP, **SGD), {"optimizer_impl": "", "optimizer": ""}),
    (job(DP, **CHECKPOINTED), {"activation_checkpointing": "DDP", "strategy": "DDP"}),
    (job(DP, "cpu"), {"strategy": "Choose DDP on a CPU, or a GPU."}),
    (job(DP, runner="torchrun"), {"runner": "DDP and FSDP2"}),
    (job(FSDP, **GRAPHS), {"cuda_graphs": "not captured", "strategy": ""}),
    (job(DDP, runner="thread"), {"runner": "torchrun"}),
]


@pytest.mark.parametrize(("config", "words"), JOBS)
def test_several_devices(config: RunConfig, words: dict[str, str]) -> None:
    issues = {issue.field: str(issue) for issue in validate(config, [*GPUS, CPU, BROKEN])}
    assert issues.keys() == words.keys()
    for field, text in words.items():
        assert text in issues[field]


def test_a_step_is_what_all_devices_take() -> None:
    assert step_sentence(job(NONE)) is None
    text = step_sentence(job(DDP, batch_size=64, gradient_accumulation_steps=4, devices_per_node=6))
    assert "1,536 samples" in str(text)
    assert "64 samples" in str(step_sentence(job(DP, batch_size=64)))
