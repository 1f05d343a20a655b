"""Which settings of the step exclude each other or have no effect. Pure; no torch import."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import (
    CompileMode,
    ConfigIssue,
    LRSchedule,
    Optimizer,
    Precision,
    RunConfig,
    Workload,
)
from trainer.workload_traits import TRAITS

_RESNET_SHRINKS = 32
"""How many pixels of a side become one: a quarter of them in the stem, half in three stages."""
_FEW_LAYERS = frozenset({Workload.LINEAR, Workload.DIGITS_MLP})


def step_problems(
    config: RunConfig, *, on_gpu: bool, compile_reason: str | None
) -> list[ConfigIssue]:
    """Every reason why a step with these settings cannot be, or would be as without one of them.

    `compile_reason` says why torch.compile cannot work for this device, None where it can.
    """
    return [
        *_pairs(config),
        *_without_effect(config),
        *_too_few_values(config),
        *(
            ()
            if config.compile_mode is CompileMode.NONE
            else _compile_problems(config, on_gpu, compile_reason)
        ),
        *(_graph_problems(config) if config.cuda_graphs and on_gpu else ()),
        *(() if on_gpu else _gpu_only(config)),
    ]


def epoch_problem(config: RunConfig, samples: int) -> ConfigIssue | None:
    """Why epochs of so many samples are too short for the settings; None where they are not."""
    batches = -(-samples // (config.batch_size * config.world_size))
    if config.gradient_accumulation_steps > batches:
        return ConfigIssue(
            "gradient_accumulation_steps",
            (
                f"an epoch has {batches} batches of {config.batch_size}, fewer than the "
                f"{config.gradient_accumulation_steps} to accumulate"
            ),
            "Lower gradient_accumulation_steps or batch_size",
        )
    total = config.epochs * -(-samples // config.step_size)
    total = min(total, config.max_steps or total)
    if 0 < config.lr_warmup_steps >= total:
        reason = f"must be below the {total:,} steps of the run, got {config.lr_warmup_steps:,}"
        return ConfigIssue("lr_warmup_steps", reason, "Lower it, or train for more steps")
    return None


def _pairs(config: RunConfig) -> Iterator[ConfigIssue]:
    """Two switches of which only one can be on: a problem of both, so that either can go."""
    exclusive = [
        ("fused", "foreach", "an optimizer is either fused or foreach"),
        (
            "deterministic",
            "cudnn_benchmark",
            "cudnn.benchmark may pick a different algorithm each run",
        ),
    ]
    for one, other, reason in exclusive:
        if getattr(config, one) and getattr(config, other):
            yield ConfigIssue(one, reason, f"Turn off {other}")
            yield ConfigIssue(other, reason, f"Turn off {one}")
    if config.lr_warmup_steps and config.lr_scheduler is LRSchedule.PLATEAU:
        reason = "the plateau schedule changes the learning rate after epochs only"
        yield ConfigIssue("lr_warmup_steps", reason, "Set it to 0, or choose the cosine schedule")


def _without_effect(config: RunConfig) -> Iterator[ConfigIssue]:
    if not TRAITS[config.workload].convolutions:
        for field in ("channels_last", "cudnn_benchmark"):
            if getattr(config, field):
                reason = f"it acts on convolutions, and {config.workload} has none"
                yield ConfigIssue(field, reason, "Switch it off")
    if config.activation_checkpointing and config.workload in _FEW_LAYERS:
        reason = "a model of one or two layers has no activations to checkpoint"
        yield ConfigIssue("activation_checkpointing", reason, "Switch it off")


def _too_few_values(config: RunConfig) -> Iterator[ConfigIssue]:
    """Batch norm needs two values of each channel, in the batch or in the image."""
    small = config.image_size <= _RESNET_SHRINKS
    if config.workload is Workload.RESNET and config.batch_size == 1 and small:
        reason = (
            f"batch norm needs two values per channel; {config.image_size} px images leave one, "
            "and the batch has one image"
        )
        remedy = f"Raise batch_size, or image_size above {_RESNET_SHRINKS}"
        yield ConfigIssue("image_size", reason, remedy)
        yield ConfigIssue("batch_size", reason, remedy)


def _gpu_only(config: RunConfig) -> Iterator[ConfigIssue]:
    reasons = {
        "cudnn_benchmark": "cuDNN runs on GPUs only",
        "cuda_graphs": "CUDA Graphs run on GPUs only",
        "preallocate_memory": "PyTorch has no caching allocator for CPU memory",
    }
    for field, reason in reasons.items():
        if getattr(config, field):
            yield ConfigIssue(field, reason, "Switch it off, or choose a GPU")


def _compile_problems(
    config: RunConfig, on_gpu: bool, compile_reason: str | None
) -> Iterator[ConfigIssue]:
    if config.compile_mode is CompileMode.NONE:
        return
    if compile_reason is not None:
        yield ConfigIssue("compile_mode", compile_reason, "Set compile_mode to none")
    if config.activation_checkpointing:
        reason = "torch.compile decides itself what to recompute"
        yield ConfigIssue("compile_mode", reason, "Switch off activation_checkpointing")
        yield ConfigIssue("activation_checkpointing", reason, "Set compile_mode to none")
    if config.compile_mode is CompileMode.REDUCE_OVERHEAD and not on_gpu:
        yield ConfigIssue(
            "compile_mode",
            "reduce-overhead uses CUDA Graphs, which need a GPU",
            "Choose default or max-autotune on a CPU",
        )


def _graph_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    if not config.cuda_graphs:
        return
    if config.compile_mode is not CompileMode.NONE:
        yield ConfigIssue(
            "cuda_graphs",
            "use either torch.compile or CUDA Graphs, not both",
            "Set compile_mode to none",
        )
        yield ConfigIssue(
            "compile_mode",
            "use either torch.compile or CUDA Graphs, not both",
            "Switch off cuda_graphs",
        )
    if config.activation_checkpointing and config.workload is Workload.GPT and config.dropout:
        reason = "dropout recomputed inside a CUDA graph would draw different random numbers"
        yield ConfigIssue("cuda_graphs", reason, "Switch off activation_checkpointing or dropout")
        yield ConfigIssue("activation_checkpointing", reason, "Switch off cuda_graphs or dropout")
    if not config.set_to_none:
        yield ConfigIssue(
            "set_to_none",
            "a captured step overwrites its gradients, so there is nothing to zero",
            "Switch it on",
        )
    for field in ("kernel_warmup", "preallocate_memory"):
        if getattr(config, field):
            reason = "CUDA Graphs already run warm-up steps and keep their memory reserved"
            yield ConfigIssue(field, reason, "Switch it off")
    if not config.fused:
        if config.precision is Precision.FP16:
            reason = (
                "a captured FP16 step needs the fused optimizer, which can skip a step on the GPU"
            )
            yield ConfigIssue("cuda_graphs", reason, "Switch on fused")
        elif config.optimizer is Optimizer.SGD:
            reason = "only fused SGD reads its learning rate from the GPU"
            yield ConfigIssue("cuda_graphs", reason, "Switch on fused")
