"""Combinations of settings: the fields with an issue, by device, workload and strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.train_devices import CPU_DEVICE as CPU
from tests.support.train_devices import gpu
from trainer import config_validation as rules
from trainer.config import SETTINGS, Precision, RunConfig, Runner, Strategy, Workload, defaults
from trainer.config_validation import (
    TRAITS,
    TrainDevice,
    WorkloadTraits,
    choice_problem,
    cores_note,
    epoch_problem,
    step_sentence,
    validate,
)

GPU = gpu()
GPUS = [GPU, replace(GPU, id="GPU-1", cuda_index=1)]
BROKEN = replace(GPU, id="GPU-9", cuda_index=9, reason="its kernels are missing")
CNN, MLP, GPT = Workload.DIGITS_CNN, Workload.DIGITS_MLP, Workload.GPT
NONE, DP, DDP, FSDP = Strategy.NONE, Strategy.DP, Strategy.DDP, Strategy.FSDP
PINNED = {"pin_memory": True, "non_blocking": True}
UNPINNED = {"pin_memory": False, "non_blocking": False}
GRAPHS: dict[str, Any] = {"cuda_graphs": True}
FP16_STEP = {"precision": "fp16", "max_grad_norm": 1.0, "gradient_accumulation_steps": 4}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}


def found(device: TrainDevice, workload: Workload = CNN, **changes: Any) -> set[str]:
    """Return the fields with an issue, each of which has a reason and a remedy."""
    issues = validate(replace(defaults(workload, device.id), **changes), [device])
    assert all(issue.reason and issue.remedy for issue in issues)
    return {issue.field for issue in issues}


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_defaults_have_no_problem(device: TrainDevice) -> None:
    assert {workload: found(device, workload) for workload in Workload} == {
        workload: set() for workload in Workload
    }


ON_CPU: list[tuple[dict[str, Any], str]] = [
    (GRAPHS, "cuda_graphs"),
    ({"cudnn_benchmark": True}, "cudnn_benchmark"),
    ({"preallocate_memory": True}, "preallocate_memory"),
    ({"precision": "pure_fp16"}, "precision"),
    ({"precision": "tf32"}, "precision"),
    ({"precision": "pure_bf16"}, ""),
    ({"precision": "pure_bf16", "optimizer": "sgd", "optimizer_impl": "foreach"}, ""),
    (
        {"precision": "pure_bf16", "optimizer": "sgd", "optimizer_impl": "fused"},
        "precision optimizer optimizer_impl",
    ),
    ({"precision": "bf16"}, ""),
    ({"precision": "fp16"}, ""),
    ({"compile_mode": "reduce-overhead"}, "compile_mode"),
    ({"compile_mode": "default"}, ""),
    ({"compile_mode": "max-autotune"}, ""),
    ({"deterministic": True, "kernel_warmup": True, "max_grad_norm": 1.0}, ""),
    ({"gradient_accumulation_steps": 4, "optimizer_impl": "foreach", "set_to_none": False}, ""),
    (CHECKPOINTED, ""),
    ({"lr_warmup_steps": 5}, ""),
    ({"lr_warmup_steps": 5, "lr_scheduler": "none"}, ""),
    ({"lr_warmup_steps": 5, "lr_scheduler": "plateau"}, "lr_warmup_steps"),
    ({"pin_memory": True}, "pin_memory"),
    ({"non_blocking": True}, "non_blocking"),
    ({"copy_stream": True}, "copy_stream"),
    ({"dataset_on_device": True}, "dataset_on_device"),
    ({"prefetch_factor": 4, "persistent_workers": False}, ""),
]
ON_GPU: list[tuple[dict[str, Any], str]] = [
    (GRAPHS, ""),
    (GRAPHS | FP16_STEP, ""),
    (GRAPHS | {"optimizer_impl": "for-loop"}, ""),
    (GRAPHS | CHECKPOINTED | {"deterministic": True}, ""),
    (GRAPHS | {"precision": "fp16", "optimizer_impl": "for-loop"}, "cuda_graphs"),
    (GRAPHS | {"optimizer": "sgd", "optimizer_impl": "for-loop"}, "cuda_graphs"),
    (GRAPHS | {"compile_mode": "default"}, "cuda_graphs compile_mode"),
    (GRAPHS | {"set_to_none": False}, "set_to_none"),
    (GRAPHS | {"kernel_warmup": True}, "kernel_warmup"),
    (GRAPHS | {"preallocate_memory": True}, "preallocate_memory"),
    ({"kernel_warmup": True, "preallocate_memory": True, "cudnn_benchmark": True}, ""),
    ({"cudnn_benchmark": True, "deterministic": True}, "cudnn_benchmark deterministic"),
    ({"precision": "pure_fp16"}, ""),
    ({"compile_mode": "reduce-overhead"}, ""),
    (CHECKPOINTED | {"compile_mode": "default"}, "compile_mode activation_checkpointing"),
    (UNPINNED, ""),
    (PINNED, ""),
    (UNPINNED | {"non_blocking": True}, "non_blocking"),
    (UNPINNED | {"copy_stream": True}, "copy_stream"),
    ({"copy_stream": True}, ""),
    ({"dataset_on_device": True}, ""),
    ({"dataset_on_device": True} | UNPINNED, ""),
    ({"dataset_on_device": True, "copy_stream": True}, "copy_stream"),
    ({"dataset_on_device": True, "num_workers": 2}, "dataset_on_device"),
]


@pytest.mark.parametrize(
    ("device", "changes", "fields"),
    [*((CPU, *row) for row in ON_CPU), *((GPU, *row) for row in ON_GPU)],
)
def test_combinations(device: TrainDevice, changes: dict[str, Any], fields: str) -> None:
    assert found(device, **changes) == set(fields.split())


def test_data_that_are_decoded_can_be_cached_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = WorkloadTraits(decodes=True, convolutions=True)
    monkeypatch.setattr(rules, "TRAITS", {**TRAITS, CNN: traits})
    assert found(GPU, dataset_on_device=True) == {"dataset_on_device"}
    assert found(GPU, num_workers=2) == set()
    assert found(CPU, dataset_on_device=True) == set()
    assert found(CPU, dataset_on_device=True, num_workers=2) == {"dataset_on_device"}


@pytest.mark.parametrize("field", ["channels_last", "cudnn_benchmark"])
def test_a_switch_without_effect_on_a_workload_is_refused(field: str) -> None:
    assert found(GPU, MLP, **{field: True}) == {field}
    assert found(GPU, CNN, **{field: True}) == set()


def test_of_two_that_exclude_each_other_either_can_be_switched_off() -> None:
    for one, other in (("deterministic", "cudnn_benchmark"), ("cudnn_benchmark", "deterministic")):
        config = replace(RunConfig(device=GPU.id), **{one: True})
        problem = choice_problem(other, True, config, [GPU])
        assert problem is not None
        switched_off = replace(config, **{one: False})
        assert choice_problem(other, True, switched_off, [GPU]) is None
        assert SETTINGS[one].label.lower() in problem.remedy.lower()
        assert choice_problem(one, False, replace(config, **{other: True}), [GPU]) is None


def test_a_missing_compiler_is_named() -> None:
    lacking = [replace(GPU, compile_reason="there is no g++ on this machine"), GPUS[1]]
    config = defaults(CNN, GPU.id)
    problem = choice_problem("compile_mode", "default", config, lacking)
    assert problem is not None
    assert "g++" in problem.reason
    assert choice_problem("compile_mode", "none", config, lacking) is None


@pytest.mark.parametrize(
    ("capability", "refused"),
    [
        ((7, 5), "tf32 bf16 pure_bf16"),
        ((8, 0), ""),
    ],
)
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


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gradient_accumulation_steps": 7}, None),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps"),
        ({"epochs": 1, "lr_warmup_steps": 6}, None),
        ({"epochs": 1, "lr_warmup_steps": 7}, "lr_warmup_steps"),
        ({"epochs": 2, "lr_warmup_steps": 7}, None),
        ({"epochs": 2, "lr_warmup_steps": 7, "max_steps": 7}, "lr_warmup_steps"),
    ],
)
def test_epochs_have_enough_batches_and_the_run_enough_steps(
    changes: dict[str, Any], field: str | None
) -> None:
    problem = epoch_problem(RunConfig(batch_size=100, **changes), 601)  # 7 batches
    assert (problem.field if problem else None) == field


def test_dropout_is_not_recomputed_in_a_graph() -> None:
    both = GRAPHS | CHECKPOINTED
    assert found(GPU, GPT, **both) == set()
    assert found(GPU, GPT, **both, dropout=0.1) == set(both)
    assert found(GPU, GPT, **GRAPHS, dropout=0.1) == set()
    assert found(GPU, Workload.IMAGES, **both, dropout=0.1) == set()


# --- several devices ---------------------------------------------------------------------------


def job(strategy: Strategy, device: str = GPU.id, **changes: Any) -> RunConfig:
    runner = Runner.TORCHRUN if strategy in (DDP, FSDP) else Runner.THREAD
    base = defaults(CNN, device)
    return replace(
        base, **{"strategy": strategy, "runner": runner, "devices_per_node": 2, **changes}
    )


UNUSED = {"cpu_offload": True}
SGD = {"optimizer": "sgd"}
JOBS: list[tuple[RunConfig, dict[str, str]]] = [
    *((job(strategy, device), {}) for strategy in (DDP, FSDP) for device in ("cpu", GPU.id)),
    (job(DDP, devices_per_node=3), {"devices_per_node": "PyTorch can use 2 here."}),
    (job(DDP, "cpu", devices_per_node=8), {}),
    (job(DDP, **SGD), {}),
    (job(FSDP, **SGD), {"optimizer_impl": "no fused SGD", "optimizer": "no fused SGD"}),
    (job(FSDP, **SGD, optimizer_impl="for-loop"), {}),
    (job(DDP, **CHECKPOINTED), {}),
    (job(DP), {}),
    (job(DP, **CHECKPOINTED), {"activation_checkpointing": "DDP", "strategy": "DDP"}),
    (job(DP, compile_mode="default"), {"compile_mode": "DDP", "strategy": "DDP"}),
    (job(DP, devices_per_node=3), {"devices_per_node": "can use 2"}),
    (job(DP, runner="torchrun"), {"runner": "DDP and FSDP2"}),
    *((job(one, **GRAPHS), {"cuda_graphs": "not captured", "strategy": ""}) for one in (DP, DDP)),
    (job(FSDP, **GRAPHS), {"cuda_graphs": "not captured", "strategy": ""}),
    (job(DDP, runner="thread"), {"runner": "torchrun"}),
    (job(NONE, runner="torchrun"), {"runner": "DDP and FSDP2"}),
    (job(NONE, "cpu", **UNUSED), {}),  # a URL may set what belongs to another strategy
    (job(DDP, "cpu", cpu_offload=True), {}),
    (job(FSDP, "cpu", cpu_offload=True), {"cpu_offload": "already"}),
    (job(FSDP, cpu_offload=True, precision="fp16"), {}),
    (job(FSDP, cpu_offload=True, precision="bf16"), {}),
]


@pytest.mark.parametrize(("config", "words"), JOBS)
def test_several_devices(config: RunConfig, words: dict[str, str]) -> None:
    issues = {issue.field: str(issue) for issue in validate(config, [*GPUS, CPU, BROKEN])}
    assert issues.keys() == words.keys()
    for field, text in words.items():
        assert text in issues[field]


def test_data_parallel_on_a_cpu_names_the_way_out() -> None:
    issues = {issue.field: str(issue) for issue in validate(job(DP, "cpu"), [CPU])}
    assert "Choose DDP on a CPU, or a GPU." in issues["strategy"]


def test_ranks_that_share_cores_have_a_note() -> None:
    four = job(DDP, "cpu", devices_per_node=4)
    assert "4 ranks share 2 cores" in str(cores_note(four, 2))
    assert (cores_note(four, 4), cores_note(job(DDP), 1)) == (None, None)  # GPUs compute


def test_a_step_is_what_all_devices_take() -> None:
    assert step_sentence(job(NONE)) is None
    text = step_sentence(job(DDP, batch_size=64, gradient_accumulation_steps=4, devices_per_node=6))
    factors = "64 × 6 ranks × 4 batches"
    advice = "You may have to rescale the learning rate."
    assert text == f"Each step uses 1,536 samples: {factors}. {advice}"
    assert step_sentence(job(DP, batch_size=64)) == "Each step uses 64 samples."
