"""Settings that a workload or device lacks or that exclude each other. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer.config import (
    SETTINGS,
    CompileMode,
    Optimizer,
    OptimizerImpl,
    Precision,
    RunConfig,
    Runner,
    Strategy,
    Workload,
    issue,
)

_WITHOUT_CONVOLUTIONS = (Workload.LINEAR, Workload.DIGITS_MLP, Workload.GPT)
_OF_AMPERE = (Precision.TF32, Precision.BF16, Precision.PURE_BF16)
_NEED_A_GPU = {
    "cudnn_benchmark": "cuDNN runs on GPUs only",
    "cuda_graphs": "CUDA Graphs run on GPUs only",
    "preallocate_memory": "PyTorch has no caching allocator for CPU memory",
    "pin_memory": "pinned memory only speeds up copies to a GPU",
    "non_blocking": "on a CPU there is nothing to copy",
    "copy_stream": "on a CPU there is nothing to copy",
}
_EXCLUSIVE: tuple[tuple[str, str, str], ...] = (
    ("deterministic", "cudnn_benchmark", "cudnn.benchmark may pick another algorithm each run"),
    ("compile_mode", "activation_checkpointing", "torch.compile decides itself what to recompute"),
    ("compile_mode", "cuda_graphs", "use either torch.compile or CUDA Graphs, not both"),
    (
        "activation_checkpointing",
        "cuda_graphs",
        "what is recomputed inside a graph would draw other random numbers",
    ),
    ("cuda_graphs", "kernel_warmup", "CUDA Graphs already run warm-up steps"),
    ("cuda_graphs", "preallocate_memory", "CUDA Graphs already keep their memory reserved"),
    (
        "cuda_graphs",
        "strategy",
        "a multi-device step is not captured: the devices wait for each other inside it",
    ),
    ("dataset_on_device", "num_workers", "workers load batches in processes of their own"),
    ("dataset_on_device", "copy_stream", "with the dataset on the device no batch is copied"),
)
"""Pairs of settings of which only one may be on, with the reason."""


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
    gpus = sum(other.cuda_index is not None and other.reason is None for other in devices)
    return (
        *_device_issues(config, device),
        *_exclusive_issues(config),
        *_optimizer_issues(config, device),
        *_loading_issues(config, device),
        *_strategy_issues(config, device, gpus),
    )


def choice_problem(
    field: str, value: Any, config: RunConfig, devices: Sequence[TrainDevice]
) -> ConfigIssue | None:
    """Return the issue that disables an option `value` of `field`; None if there is none."""
    try:
        candidate = replace(config, **{field: value})
    except ConfigError as error:
        return error.problem
    return next((p for p in validate(candidate, devices) if p.field == field), None)


def is_possible(
    name: str, value: Any, config: Mapping[str, Any], devices: Sequence[TrainDevice]
) -> bool:
    """Return True if a run of this configuration could have a setting on these devices."""
    try:
        current = RunConfig.from_dict(config)
    except ConfigError:  # settings of another version
        return False
    if devices and current.device not in {device.id for device in devices}:
        current = replace(current, device=devices[0].id)  # a run of another machine
    return choice_problem(name, value, current, devices) is None


def halved_batch(config: RunConfig, devices: Sequence[TrainDevice]) -> RunConfig | ConfigIssue:
    """Return a configuration with half the batch and equally many samples a step, or an issue."""
    if config.batch_size < 2:
        reason = "a batch of one sample cannot be halved"
        return issue("batch_size", reason, "Lower other sizes")
    try:
        smaller = replace(
            config,
            batch_size=config.batch_size // 2,
            gradient_accumulation_steps=2 * config.gradient_accumulation_steps,
        )
    except ConfigError as error:
        return error.problem
    return next(iter(validate(smaller, devices)), smaller)


def step_sentence(config: RunConfig) -> str | None:
    """Return a sentence with the samples per optimizer step; None for one device."""
    if config.strategy is Strategy.NONE:
        return None
    rate = " You may have to rescale the learning rate." if config.world_size > 1 else ""
    return f"Each step uses {config.step_size:,} samples.{rate}"


def _issues(fields: Sequence[str], reason: str, remedy: str) -> Iterator[ConfigIssue]:
    """Yield an issue with the same reason and remedy for each field."""
    return (issue(field, reason, remedy) for field in fields)


def _is_on(config: RunConfig, field: str) -> bool:
    return getattr(config, field) not in (0, "none")


def _device_issues(config: RunConfig, device: TrainDevice) -> Iterator[ConfigIssue]:
    """Yield what the device does not support."""
    compiles = config.compile_mode is not CompileMode.NONE
    precision = SETTINGS["precision"].choices[config.precision]
    if device.reason:
        yield issue("device", device.reason, "Choose another device")
    if compiles and device.compile_reason:
        yield issue("compile_mode", device.compile_reason, "Switch off torch.compile")
    if config.workload in _WITHOUT_CONVOLUTIONS:
        reason = f"it acts on convolutions, and {config.workload} has none"
        for field in ("channels_last", "cudnn_benchmark"):
            if _is_on(config, field):
                yield issue(field, reason, "Switch it off")
    if device.compute_capability is None:
        for field, reason in _NEED_A_GPU.items():
            if _is_on(config, field):
                yield issue(field, reason, "Switch it off, or choose a GPU")
        if config.compile_mode is CompileMode.REDUCE_OVERHEAD:
            reason = "reduce-overhead uses CUDA Graphs, which need a GPU"
            yield issue("compile_mode", reason, "Choose default or max-autotune on a CPU")
        # Autocast to bf16 and fp16 works on every CPU, but slowly without native instructions.
        if config.precision in (Precision.TF32, Precision.PURE_FP16):
            reason = f"{precision} needs a GPU: CPUs have no arithmetic for it"
            yield issue("precision", reason, "Choose fp32, bf16 or fp16")
    elif config.precision in _OF_AMPERE and device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        reason = f"{precision} needs compute capability 8.0, {device.name} has "
        yield issue("precision", f"{reason}{major}.{minor}", "Choose fp16 or fp32")


def _exclusive_issues(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an issue for both settings of each pair that excludes each other."""
    for one, other, reason in _EXCLUSIVE:
        if _is_on(config, one) and _is_on(config, other):
            yield issue(one, reason, f"Switch off {SETTINGS[other].label}")
            yield issue(other, reason, f"Switch off {SETTINGS[one].label}")


def _optimizer_issues(config: RunConfig, device: TrainDevice) -> Iterator[ConfigIssue]:
    fused = config.optimizer_impl is OptimizerImpl.FUSED
    if config.cuda_graphs and config.gradient_accumulation_steps > 1:
        reason = "a captured step is one batch"
        remedy = "Switch off CUDA Graphs, or do not accumulate"
        yield from _issues(("cuda_graphs", "gradient_accumulation_steps"), reason, remedy)
    if config.cuda_graphs and not fused:
        reason = "a captured step needs the fused optimizer, which decides on the GPU"
        remedy = "Choose fused, or switch off CUDA Graphs"
        yield from _issues(("cuda_graphs", "optimizer_impl"), reason, remedy)
    if not fused or config.optimizer is not Optimizer.SGD:
        return
    if config.strategy is Strategy.FSDP:
        reason = "PyTorch has no fused SGD for sharded weights"
        yield from _issues(("optimizer", "optimizer_impl"), reason, "Choose foreach, or Adam")
    if device.cuda_index is None and config.precision is Precision.PURE_BF16:
        reason = "on a CPU, PyTorch's fused SGD does not update 16-bit weights"
        fields = ("precision", "optimizer", "optimizer_impl")
        yield from _issues(fields, reason, "Choose the foreach implementation, Adam or bf16")


def _loading_issues(config: RunConfig, device: TrainDevice) -> Iterator[ConfigIssue]:
    on_gpu = device.cuda_index is not None
    if on_gpu and not config.pin_memory:
        for field in ("non_blocking", "copy_stream"):
            if _is_on(config, field):
                reason = "only copies from pinned memory can overlap"
                yield issue(field, reason, "Switch on pin_memory")
    # pin_memory and non_blocking may stay on, their default, although they have no effect.
    decodes = config.workload is Workload.IMAGES
    if config.dataset_on_device and decodes is on_gpu:
        reason = "on a CPU the data is already in memory"
        if on_gpu:
            reason = f"{config.workload} reads each sample from disk on demand"
        yield issue("dataset_on_device", reason, "Switch it off")


def _strategy_issues(config: RunConfig, device: TrainDevice, gpus: int) -> Iterator[ConfigIssue]:
    """Yield what DataParallel, DDP and FSDP2 do not support on a machine with `gpus` GPUs."""
    if config.distributed and config.runner is not Runner.TORCHRUN:
        reason = f"{config.strategy} ranks are started by torchrun"
        yield issue("runner", reason, "Run in torchrun")
    if not config.distributed and config.runner is Runner.TORCHRUN:
        yield issue("runner", "torchrun is only for DDP and FSDP2", "Run in a separate process")
    if config.strategy is Strategy.NONE:
        return
    on_gpu = device.cuda_index is not None
    if on_gpu and config.devices_per_node > gpus:
        reason = f"each rank needs its own GPU, and PyTorch can use {gpus} here"
        yield issue("devices_per_node", reason, f"Lower it to {max(1, gpus)}")
    if config.strategy is Strategy.DP:
        if not on_gpu:
            reason = "DataParallel replicates the model across GPUs"
            yield issue("strategy", reason, "Choose DDP on a CPU, or a GPU")
        for field in ("compile_mode", "activation_checkpointing"):
            if _is_on(config, field):
                reason = "DataParallel replicates the model every step, which excludes this"
                remedy = f"Choose DDP, or switch off {SETTINGS[field].label}"
                yield from _issues((field, "strategy"), reason, remedy)
