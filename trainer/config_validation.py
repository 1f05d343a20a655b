"""Settings that a workload or device lacks or that exclude each other. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer.config import (
    CompileMode,
    LRSchedule,
    Optimizer,
    OptimizerImpl,
    Precision,
    RunConfig,
    Runner,
    Strategy,
    Workload,
    issue,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadTraits:
    """Properties of a workload that decide which settings act on it."""

    convolutions: bool = False  # channels_last and cuDNN settings have an effect
    decodes: bool = False  # samples are read from files on demand
    seeded_data: bool = False  # the data depend on the seed


TRAITS: dict[Workload, WorkloadTraits] = {
    Workload.LINEAR: WorkloadTraits(seeded_data=True),
    Workload.DIGITS_MLP: WorkloadTraits(),
    Workload.DIGITS_CNN: WorkloadTraits(convolutions=True),
    Workload.IMAGES: WorkloadTraits(convolutions=True, decodes=True),
    Workload.GPT: WorkloadTraits(),
    Workload.RESNET: WorkloadTraits(convolutions=True, seeded_data=True),
    Workload.MATMUL: WorkloadTraits(seeded_data=True),
    Workload.MEMORY_STRESS: WorkloadTraits(convolutions=True, seeded_data=True),
    # Its model and data are unknown before its file runs: nothing is ruled out.
    Workload.CUSTOM: WorkloadTraits(convolutions=True),
}

_OF_AMPERE = (Precision.TF32, Precision.BF16, Precision.PURE_BF16)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDevice:
    """A device of `list_devices`; the reasons are None if torch or torch.compile works on it."""

    id: str  # "cpu" or the GPU's UUID, as NVML prints it
    name: str
    memory_total: int  # bytes
    cuda_index: int | None = None  # index in torch, which depends on CUDA_VISIBLE_DEVICES
    compute_capability: tuple[int, int] | None = None
    reason: str | None = None
    compile_reason: str | None = None


def validate(config: RunConfig, devices: Sequence[TrainDevice]) -> tuple[ConfigIssue, ...]:
    """Return all issues that prevent a start on these devices; empty if there are none."""
    device = next((device for device in devices if device.id == config.device), None)
    if device is None:
        reason = f"this machine has no device {config.device}"
        return (issue("device", reason, "Choose another device"),)
    on_gpu = device.cuda_index is not None
    others = any(other.reason is None for other in devices)
    remedy = "Choose another device" if others else "No other device can train here"
    usable = sum(other.cuda_index is not None and other.reason is None for other in devices)
    compiles = config.compile_mode is not CompileMode.NONE
    found = [
        issue("device", device.reason, remedy) if device.reason else None,
        _precision_problem(config.precision, device),
        *_model_problems(config),
        *(_compile_problems(config, on_gpu, device.compile_reason) if compiles else ()),
        *(_graph_problems(config) if config.cuda_graphs and on_gpu else ()),
        *(() if on_gpu else _gpu_only(config)),
        *(_copy_problems(config) if on_gpu else _on_a_cpu(config)),
        *(_data_parallel(config, on_gpu) if config.strategy is Strategy.DP else ()),
        *_ranks(config, usable if on_gpu else None),
        *(_sharded(config, on_gpu) if config.strategy is Strategy.FSDP else ()),
    ]
    return tuple(problem for problem in found if problem is not None)


def choice_problem(
    field: str, value: Any, config: RunConfig, devices: Sequence[TrainDevice]
) -> ConfigIssue | None:
    """Return the issue that disables an option `value` of `field`; None if there is none."""
    try:
        candidate = replace(config, **{field: value})
    except ConfigError as error:
        return error.problem
    return next((p for p in validate(candidate, devices) if p.field == field), None)


def _precision_problem(precision: Precision, device: TrainDevice) -> ConfigIssue | None:
    capability = device.compute_capability
    if capability is None:
        # Autocast to bf16 and fp16 works on every CPU, but slowly without native instructions.
        reason = {
            Precision.TF32: "TF32 needs NVIDIA tensor cores",
            Precision.PURE_FP16: "pure FP16 needs a GPU: most CPUs have no FP16 arithmetic",
        }.get(precision)
        return issue("precision", reason, "Choose fp32, bf16 or fp16") if reason else None
    if precision not in _OF_AMPERE or capability >= (8, 0):
        return None
    has = f"{device.name} has {capability[0]}.{capability[1]}"
    reason = f"{precision} needs compute capability 8.0, {has}"
    return issue("precision", reason, "Choose fp16 or fp32")


def divided_batch(
    config: RunConfig, devices: Sequence[TrainDevice], divisor: int
) -> RunConfig | ConfigIssue:
    """Return a configuration with a smaller batch and equally many samples a step, or an issue."""
    if config.batch_size < 2:
        reason = "a batch of one sample cannot be halved"
        return issue("batch_size", reason, "Lower other sizes")
    divisor = min(divisor, config.batch_size)
    try:
        smaller = replace(
            config,
            batch_size=config.batch_size // divisor,
            gradient_accumulation_steps=divisor * config.gradient_accumulation_steps,
        )
    except ConfigError as error:
        return error.problem
    return next(iter(validate(smaller, devices)), smaller)


def epoch_problem(config: RunConfig, samples: int) -> ConfigIssue | None:
    """Return an issue if epochs of `samples` samples are too short; None otherwise."""
    batches = -(-samples // (config.batch_size * config.world_size))
    if config.gradient_accumulation_steps > batches:
        reason = (
            f"an epoch has {batches} batches of {config.batch_size}, fewer than the "
            f"{config.gradient_accumulation_steps} to accumulate"
        )
        remedy = "Lower gradient accumulation or the batch size"
        return issue("gradient_accumulation_steps", reason, remedy)
    total = config.epochs * -(-samples // config.step_size)
    total = min(total, config.max_steps or total)
    if 0 < config.lr_warmup_steps >= total:
        reason = f"must be below the {total:,} steps of the run, got {config.lr_warmup_steps:,}"
        return issue("lr_warmup_steps", reason, "Lower it, or train for more steps")
    return None


def _model_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.deterministic and config.cudnn_benchmark:
        reason = "cudnn.benchmark may pick a different algorithm each run"
        yield issue("deterministic", reason, "Switch off cudnn.benchmark")
        yield issue("cudnn_benchmark", reason, "Switch off deterministic algorithms")
    if config.lr_warmup_steps and config.lr_scheduler is LRSchedule.PLATEAU:
        reason = "the plateau schedule changes the learning rate after epochs only"
        yield issue("lr_warmup_steps", reason, "Set it to 0, or choose the cosine schedule")
    if not TRAITS[config.workload].convolutions:
        reason = f"it acts on convolutions, and {config.workload} has none"
        yield from _unsupported(config, {"channels_last": reason, "cudnn_benchmark": reason})


def _gpu_only(config: RunConfig) -> Iterator[ConfigIssue]:
    reasons = {
        "cudnn_benchmark": "cuDNN runs on GPUs only",
        "cuda_graphs": "CUDA Graphs run on GPUs only",
        "preallocate_memory": "PyTorch has no caching allocator for CPU memory",
    }
    yield from _unsupported(config, reasons, "Switch it off, or choose a GPU")


def _compile_problems(
    config: RunConfig, on_gpu: bool, compile_reason: str | None
) -> Iterator[ConfigIssue]:
    if compile_reason is not None:
        yield issue("compile_mode", compile_reason, "Switch off torch.compile")
    if config.activation_checkpointing:
        reason = "torch.compile decides itself what to recompute"
        yield issue("compile_mode", reason, "Switch off activation checkpointing")
        yield issue("activation_checkpointing", reason, "Switch off torch.compile")
    if config.compile_mode is CompileMode.REDUCE_OVERHEAD and not on_gpu:
        reason = "reduce-overhead uses CUDA Graphs, which need a GPU"
        yield issue("compile_mode", reason, "Choose default or max-autotune on a CPU")


def _graph_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.compile_mode is not CompileMode.NONE:
        reason = "use either torch.compile or CUDA Graphs, not both"
        yield issue("cuda_graphs", reason, "Switch off torch.compile")
        yield issue("compile_mode", reason, "Switch off CUDA Graphs")
    if config.activation_checkpointing and config.workload is Workload.GPT and config.dropout:
        reason = "dropout recomputed inside a CUDA graph would draw different random numbers"
        yield issue("cuda_graphs", reason, "Switch off activation checkpointing or dropout")
        yield issue("activation_checkpointing", reason, "Switch off CUDA Graphs or dropout")
    if not config.set_to_none:
        reason = "a captured step overwrites its gradients, so there is nothing to zero"
        yield issue("set_to_none", reason, "Switch it on")
    reason = "CUDA Graphs already run warm-up steps and keep their memory reserved"
    yield from _unsupported(config, {"kernel_warmup": reason, "preallocate_memory": reason})
    if config.optimizer_impl is not OptimizerImpl.FUSED:
        fused = "Choose the fused optimizer implementation"
        if config.precision is Precision.FP16:
            reason = "a captured FP16 step needs the fused optimizer, which skips steps on the GPU"
            yield issue("cuda_graphs", reason, fused)
        elif config.optimizer is Optimizer.SGD:
            reason = "only fused SGD reads its learning rate from the GPU"
            yield issue("cuda_graphs", reason, fused)


def _on_a_cpu(config: RunConfig) -> Iterator[ConfigIssue]:
    reasons = {
        "pin_memory": "pinned memory only speeds up copies to a GPU",
        "non_blocking": "on a CPU there is nothing to copy",
        "copy_stream": "on a CPU there is nothing to copy",
    }
    if not TRAITS[config.workload].decodes:
        reasons["dataset_on_device"] = "on a CPU the data is already in memory"
    yield from _unsupported(config, reasons)
    if config.dataset_on_device and config.num_workers:
        reason = "workers decode in their own processes"
        yield issue("dataset_on_device", reason, "Set num_workers to 0")
    fused_sgd = config.optimizer is Optimizer.SGD and config.optimizer_impl is OptimizerImpl.FUSED
    if fused_sgd and config.precision is Precision.PURE_BF16:
        reason = "on a CPU, PyTorch's fused SGD does not update 16-bit weights"
        remedy = "Choose the foreach implementation, Adam or bf16"
        for field in ("precision", "optimizer", "optimizer_impl"):
            yield issue(field, reason, remedy)


def _copy_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    if not config.pin_memory:
        reasons = dict.fromkeys(
            ("non_blocking", "copy_stream"), "only copies from pinned memory can overlap"
        )
        yield from _unsupported(config, reasons, "Switch on pin_memory")
    if not config.dataset_on_device:
        return
    # pin_memory and non_blocking may stay on, their default, although they have no effect.
    if config.copy_stream:
        reason = "with the dataset on the device no batch is copied"
        yield issue("copy_stream", reason, "Switch it off, or the dataset on the device")
    if config.num_workers:
        reason = "workers load batches on the host"
        yield issue("dataset_on_device", reason, "Set num_workers to 0")
    if TRAITS[config.workload].decodes:
        reason = f"{config.workload} reads each sample from disk on demand"
        yield issue("dataset_on_device", reason, "Switch it off")


def cores_note(config: RunConfig, cores: int) -> str | None:
    """Return a warning if the ranks of a CPU job share its `cores` cores; None otherwise."""
    if not config.distributed or config.device != "cpu" or config.devices_per_node <= cores:
        return None
    have = "core" if cores == 1 else "cores"
    return (
        f"{config.devices_per_node} ranks share {cores} {have}: good to see how ranks work "
        "together, but slower than fewer ranks."
    )


def step_sentence(config: RunConfig) -> str | None:
    """Return a sentence with the samples per optimizer step; None for one device."""
    if config.strategy is Strategy.NONE:
        return None
    factors = {"ranks": config.world_size, "batches": config.gradient_accumulation_steps}
    several = "".join(f" × {count} {name}" for name, count in factors.items() if count > 1)
    product = f": {config.batch_size:,}{several}" if several else ""
    advice = " You may have to rescale the learning rate." if config.world_size > 1 else ""
    return f"Each step uses {config.step_size:,} samples{product}.{advice}"


def _data_parallel(config: RunConfig, on_gpu: bool) -> Iterator[ConfigIssue]:
    if not on_gpu:
        reason = "DataParallel replicates the model across GPUs"
        yield issue("strategy", reason, "Choose DDP on a CPU, or a GPU")
    if config.compile_mode is not CompileMode.NONE:
        remedy = "Choose DDP, or switch off torch.compile"
        reason = (
            "DataParallel replicates the model every step, which torch.compile does not support"
        )
        yield issue("compile_mode", reason, remedy)
        yield issue("strategy", reason, remedy)
    if config.activation_checkpointing:
        reason = "DataParallel replicas would recompute on the first GPU"
        yield issue("activation_checkpointing", reason, "Switch it off, or choose DDP")
        yield issue("strategy", reason, "Choose DDP, or switch off activation checkpointing")


def _ranks(config: RunConfig, gpus: int | None) -> Iterator[ConfigIssue]:
    if config.distributed and config.runner is not Runner.TORCHRUN:
        reason = f"{config.strategy} ranks are started by torchrun"
        yield issue("runner", reason, "Run in torchrun")
    if not config.distributed and config.runner is Runner.TORCHRUN:
        yield issue("runner", "torchrun is only for DDP and FSDP2", "Run in a separate process")
    if gpus is None or config.strategy is Strategy.NONE:
        return
    if config.devices_per_node > gpus:
        reason = f"each rank needs its own GPU, and PyTorch can use {gpus} here"
        yield issue("devices_per_node", reason, f"Lower it to {max(1, gpus)}")
    if config.cuda_graphs:
        reason = "a multi-device step is not captured: the devices wait for each other inside it"
        yield issue("cuda_graphs", reason, "Switch it off, or choose no strategy")
        yield issue("strategy", reason, "Switch off CUDA Graphs")


def _sharded(config: RunConfig, on_gpu: bool) -> Iterator[ConfigIssue]:
    if config.optimizer is Optimizer.SGD and config.optimizer_impl is OptimizerImpl.FUSED:
        reason = "PyTorch has no fused SGD for sharded weights"
        yield issue("optimizer_impl", reason, "Choose foreach, or Adam")
        yield issue("optimizer", reason, "Choose Adam or AdamW, or the foreach implementation")
    if not on_gpu:
        reason = "on a CPU the weights are already in host memory"
        yield from _unsupported(config, {"cpu_offload": reason}, "Switch it off, or choose a GPU")


def _unsupported(
    config: RunConfig, reasons: Mapping[str, str], remedy: str = "Switch it off"
) -> Iterator[ConfigIssue]:
    """Yield an issue for each field in `reasons` that is on."""
    found = reasons.items()
    return (issue(field, reason, remedy) for field, reason in found if getattr(config, field))
