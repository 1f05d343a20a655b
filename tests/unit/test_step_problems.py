"""Settings of the step that exclude each other, or have no effect: told, with a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.config import RunConfig, Workload, defaults
from trainer.config_validation import TrainDevice, choice_problem, epoch_problem, validate

CPU = TrainDevice(id="cpu", name="CPU", memory_total=2**30)
GPU = TrainDevice(
    id="GPU-0", name="GPU", memory_total=2**30, cuda_index=0, compute_capability=(9, 0)
)
CNN, MLP = Workload.DIGITS_CNN, Workload.DIGITS_MLP


def found(device: TrainDevice, workload: Workload = CNN, **changes: Any) -> set[str]:
    config = replace(defaults(workload, device.id), **changes)
    return {problem.field for problem in validate(config, [device])}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"cuda_graphs": True}, {"cuda_graphs"}),
        ({"cudnn_benchmark": True}, {"cudnn_benchmark"}),
        ({"preallocate_memory": True}, {"preallocate_memory"}),
        ({"precision": "pure_fp16"}, {"precision"}),
        ({"compile_mode": "reduce-overhead"}, {"compile_mode"}),
        ({"precision": "pure_bf16"}, set()),
        ({"compile_mode": "default"}, set()),
        ({"compile_mode": "max-autotune"}, set()),
        (
            {
                "deterministic": True,
                "kernel_warmup": True,
                "gradient_accumulation_steps": 4,
                "max_grad_norm": 1.0,
            },
            set(),
        ),
        ({"optimizer_impl": "foreach", "set_to_none": False}, set()),
        ({"activation_checkpointing": True}, set()),
        ({"lr_warmup_steps": 5}, set()),
        ({"lr_warmup_steps": 5, "lr_scheduler": "none"}, set()),
        ({"lr_warmup_steps": 5, "lr_scheduler": "plateau"}, {"lr_warmup_steps"}),
    ],
)
def test_on_a_cpu(changes: dict[str, Any], fields: set[str]) -> None:
    assert found(CPU, **changes) == fields


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"cuda_graphs": True}, set()),
        (
            {
                "cuda_graphs": True,
                "precision": "fp16",
                "max_grad_norm": 1.0,
                "gradient_accumulation_steps": 4,
            },
            set(),
        ),
        ({"cuda_graphs": True, "optimizer_impl": "for-loop"}, set()),
        ({"cuda_graphs": True, "activation_checkpointing": True, "deterministic": True}, set()),
        ({"cuda_graphs": True, "precision": "fp16", "optimizer_impl": "for-loop"}, {"cuda_graphs"}),
        ({"cuda_graphs": True, "optimizer": "sgd", "optimizer_impl": "for-loop"}, {"cuda_graphs"}),
        ({"cuda_graphs": True, "compile_mode": "default"}, {"cuda_graphs", "compile_mode"}),
        ({"cuda_graphs": True, "set_to_none": False}, {"set_to_none"}),
        ({"cuda_graphs": True, "kernel_warmup": True}, {"kernel_warmup"}),
        ({"cuda_graphs": True, "preallocate_memory": True}, {"preallocate_memory"}),
        ({"kernel_warmup": True, "preallocate_memory": True, "cudnn_benchmark": True}, set()),
        ({"cudnn_benchmark": True, "deterministic": True}, {"cudnn_benchmark", "deterministic"}),
        ({"precision": "pure_fp16"}, set()),
        ({"compile_mode": "reduce-overhead"}, set()),
        (
            {"compile_mode": "default", "activation_checkpointing": True},
            {"compile_mode", "activation_checkpointing"},
        ),
    ],
)
def test_on_a_gpu(changes: dict[str, Any], fields: set[str]) -> None:
    assert found(GPU, **changes) == fields


@pytest.mark.parametrize("field", ["channels_last", "cudnn_benchmark", "activation_checkpointing"])
def test_a_switch_that_a_workload_cannot_feel_is_refused(field: str) -> None:
    assert found(GPU, MLP, **{field: True}) == {field}
    assert found(GPU, CNN, **{field: True}) == set()


def test_of_two_that_exclude_each_other_either_can_be_switched_off() -> None:
    for one, other in (("deterministic", "cudnn_benchmark"), ("cudnn_benchmark", "deterministic")):
        config = replace(RunConfig(device=GPU.id), **{one: True})
        problem = choice_problem(other, True, config, [GPU])
        assert problem is not None
        assert problem.remedy == f"Turn off {one}"
        assert choice_problem(one, False, replace(config, **{other: True}), [GPU]) is None


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_missing_compiler_is_named(device: TrainDevice) -> None:
    without = replace(device, compile_reason="there is no g++ on this machine")
    problem = choice_problem("compile_mode", "default", defaults(CNN, device.id), [without])
    assert problem is not None
    assert "g++" in problem.reason
    assert choice_problem("compile_mode", "none", defaults(CNN, device.id), [without]) is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_pure_bf16_needs_what_bf16_needs(capability: tuple[int, int]) -> None:
    old = replace(GPU, compute_capability=capability)
    for precision in ("bf16", "pure_bf16"):
        assert found(old, precision=precision) == ({"precision"} if capability < (8, 0) else set())
    assert found(old, precision="pure_fp16") == set()


@pytest.mark.parametrize(("accumulation", "fits"), [(1, True), (7, True), (8, False)])
def test_a_step_has_no_more_batches_than_an_epoch(accumulation: int, fits: bool) -> None:
    config = RunConfig(batch_size=100, gradient_accumulation_steps=accumulation)
    assert (epoch_problem(config, 601) is None) == fits


@pytest.mark.parametrize(
    ("changes", "fits"),
    [({"epochs": 2}, True), ({"epochs": 1}, False), ({"epochs": 2, "max_steps": 7}, False)],
)
def test_a_warm_up_ends_within_the_run(changes: dict[str, Any], fits: bool) -> None:
    config = RunConfig(
        **{"batch_size": 50, "gradient_accumulation_steps": 2, "lr_warmup_steps": 7, **changes}
    )
    problem = epoch_problem(config, 601)
    assert (problem is None) == fits
    assert problem is None or problem.field == "lr_warmup_steps"


def test_dropout_is_not_recomputed_in_a_graph() -> None:
    both = {"cuda_graphs": True, "activation_checkpointing": True}
    assert found(GPU, Workload.GPT, **both) == set()
    assert found(GPU, Workload.GPT, **both, dropout=0.1) == set(both)
    assert found(GPU, Workload.GPT, cuda_graphs=True, dropout=0.1) == set()
    assert found(GPU, Workload.IMAGES, **both, dropout=0.1) == set()


@pytest.mark.parametrize(("image_size", "batch_size"), [(8, 1), (32, 1), (33, 1), (32, 2)])
def test_resnet_needs_two_values_a_channel(image_size: int, batch_size: int) -> None:
    sizes = {"image_size": image_size, "batch_size": batch_size, "width": 8, "num_classes": 2}
    refused = found(CPU, Workload.RESNET, **sizes)
    if (image_size > 32) or batch_size > 1:
        assert refused == set()
    else:
        assert refused == {"image_size", "batch_size"}
    assert found(CPU, Workload.MEMORY_STRESS, image_size=8, batch_size=1) == set()
