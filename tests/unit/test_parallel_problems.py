"""Several devices: what cannot share the work, what acts on which kind, and what a step takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.config import (
    CompileMode,
    Optimizer,
    OptimizerImpl,
    Precision,
    RunConfig,
    Runner,
    Strategy,
    Workload,
    defaults,
)
from trainer.config_validation import (
    TrainDevice,
    choice_problem,
    parallel_notes,
    start_problem,
    step_sentence,
    validate,
)

CPU = TrainDevice(id="cpu", name="CPU", memory_total=2**30)
GPUS = [
    TrainDevice(
        id=f"GPU-{i}", name="GPU", memory_total=2**30, cuda_index=i, compute_capability=(9, 0)
    )
    for i in range(2)
]
BROKEN = replace(GPUS[0], id="GPU-9", cuda_index=9, reason="its kernels are missing")
DEVICES = [*GPUS, CPU, BROKEN]
DDP, FSDP, DP = Strategy.DDP, Strategy.FSDP, Strategy.DP


def config(parallel: Strategy, device: str = "GPU-0", **changes: Any) -> RunConfig:
    runner = Runner.TORCHRUN if parallel in (DDP, FSDP) else Runner.THREAD
    base = defaults(Workload.DIGITS_CNN, device)
    return replace(base, strategy=parallel, runner=runner, devices_per_node=2, **changes)


def refused(asked: RunConfig) -> dict[str, str]:
    """The first reason of each field."""
    found: dict[str, str] = {}
    for problem in validate(asked, DEVICES):
        found.setdefault(problem.field, str(problem))
    return found


@pytest.mark.parametrize("device", ["cpu", "GPU-0"])
@pytest.mark.parametrize("parallel", [DDP, FSDP])
def test_ranks_train_on_cpus_and_gpus(parallel: Strategy, device: str) -> None:
    assert refused(config(parallel, device)) == {}


@pytest.mark.parametrize(
    "asked",
    [
        config(DP, "cpu"),
        config(DP, compile_mode=CompileMode.DEFAULT),
        config(DP, activation_checkpointing=True),
        replace(config(DP), runner=Runner.TORCHRUN),
    ],
)
def test_a_refusal_names_what_to_choose_as_the_list_does(asked: RunConfig) -> None:
    said = " ".join(refused(asked).values())
    assert "DDP" in said
    assert "ddp" not in said


def test_each_rank_needs_a_usable_gpu() -> None:
    assert (
        "PyTorch can use 2 here."
        in refused(replace(config(DDP), devices_per_node=3))["devices_per_node"]
    )
    assert refused(replace(config(DDP, "cpu"), devices_per_node=8)) == {}


def test_other_machines_may_have_more_gpus() -> None:
    several = replace(config(DDP), devices_per_node=8, num_nodes=2)
    assert refused(several) == {}
    assert start_problem(several) is not None
    assert start_problem(config(DDP)) is None


def test_the_fused_sgd_has_no_form_for_weights_that_are_spread() -> None:
    for parallel, fields in ((FSDP, {"optimizer_impl", "optimizer"}), (DDP, set())):
        assert refused(config(parallel, optimizer=Optimizer.SGD)).keys() == fields
    assert (
        refused(config(FSDP, optimizer=Optimizer.SGD, optimizer_impl=OptimizerImpl.FOR_LOOP)) == {}
    )


def test_blocks_that_compute_again_cannot_be_copied_to_other_gpus() -> None:
    found = refused(config(DP, activation_checkpointing=True))
    assert found.keys() == {"activation_checkpointing", "strategy"}
    assert refused(config(DDP, activation_checkpointing=True)) == {}


def test_data_parallel_is_for_gpus_of_one_process() -> None:
    assert refused(config(DP)) == {}
    assert "Choose DDP on a CPU, or a GPU." in refused(config(DP, "cpu"))["strategy"]
    compiled = refused(config(DP, compile_mode=CompileMode.DEFAULT))
    assert {"compile_mode", "strategy"} <= compiled.keys()
    assert "devices_per_node" in refused(replace(config(DP), devices_per_node=3))


@pytest.mark.parametrize("parallel", [DP, DDP, FSDP])
def test_a_step_of_several_devices_is_not_captured(parallel: Strategy) -> None:
    assert "not captured" in refused(config(parallel, cuda_graphs=True))["cuda_graphs"]


def test_the_runner_belongs_to_the_kind() -> None:
    assert "torchrun" in refused(replace(config(DDP), runner=Runner.THREAD))["runner"]
    alone = replace(config(Strategy.NONE), runner=Runner.TORCHRUN)
    assert "DDP and FSDP2" in refused(alone)["runner"]


def test_what_does_not_act_is_no_problem() -> None:
    """A link may set what belongs to another kind; the sidebar does not show it."""
    unused = {"cpu_offload": True, "time_collectives": True, "static_graph": True, "num_nodes": 4}
    assert refused(config(Strategy.NONE, "cpu", **unused)) == {}
    assert refused(config(DDP, "cpu", cpu_offload=True, reshard_after_forward=False)) == {}


def test_what_a_cpu_cannot_do_for_ranks() -> None:
    assert "gloo" in refused(config(DDP, "cpu", time_collectives=True))["time_collectives"]
    assert "already" in refused(config(FSDP, "cpu", cpu_offload=True))["cpu_offload"]


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_mixed_precision_goes_with_offloaded_weights(precision: Precision) -> None:
    assert refused(config(FSDP, cpu_offload=True, precision=precision)) == {}


def test_without_a_connection_there_are_no_ranks() -> None:
    lonely = replace(GPUS[0], connection_reason="torch was built without NCCL")
    problem = choice_problem("strategy", DDP, config(Strategy.NONE), [lonely, GPUS[1]])
    assert problem is not None
    assert "without NCCL" in problem.reason
    assert choice_problem("strategy", DP, config(Strategy.NONE), [lonely, GPUS[1]]) is None


def test_more_ranks_than_cores_are_said_to_be_slow() -> None:
    four = replace(config(DDP, "cpu"), devices_per_node=4)
    (note,) = parallel_notes(four, 2)
    assert "4 ranks share 2 cores" in note
    assert parallel_notes(four, 4) == []
    assert parallel_notes(config(DDP), 1) == []  # GPUs compute


def test_whole_gradients_between_batches_are_said_before_a_start() -> None:
    (note,) = parallel_notes(config(FSDP, gradient_accumulation_steps=2), 1)
    assert "no_sync" in note
    for changes in (
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 2, "no_sync": False},
    ):
        assert parallel_notes(config(FSDP, **changes), 1) == []
    assert parallel_notes(config(DDP, gradient_accumulation_steps=2), 1) == []


def test_a_step_is_what_all_devices_take() -> None:
    assert step_sentence(config(Strategy.NONE)) is None
    each = config(DDP, batch_size=64, gradient_accumulation_steps=4, num_nodes=3)
    text = step_sentence(each)
    assert text is not None
    assert text.startswith("Each step uses 1,536 samples: 64 × 2 ranks × 3 machines × 4 batches.")
    divided = step_sentence(config(DP, batch_size=64))
    assert divided is not None
    assert "64 samples: batches of 64, each split across 2 GPUs." in divided
