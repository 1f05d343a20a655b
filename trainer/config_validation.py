"""Which settings a device cannot run, and why, before anything starts. Pure; no torch import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import ConfigError, ConfigIssue, Precision, RunConfig
from trainer.step_validation import step_problems
from trainer.strategy_validation import parallel_problems
from trainer.workload_traits import TRAITS


def loading_problems(config: RunConfig, *, on_gpu: bool) -> list[ConfigIssue]:
    """Every reason why batches cannot be loaded with these settings, or come as without one."""
    return [
        *(_copy_problems(config) if on_gpu else _on_a_cpu(config)),
        *(() if config.num_workers else _without_workers(config)),
    ]


def _on_a_cpu(config: RunConfig) -> Iterator[ConfigIssue]:
    reasons = {
        "pin_memory": "pinned memory only speeds up copies to a GPU",
        "non_blocking": "on a CPU there is nothing to copy",
        "copy_stream": "on a CPU there is nothing to copy",
    }
    if not TRAITS[config.workload].decodes:
        reasons["dataset_on_device"] = "on a CPU the data is already in memory"
    for field, reason in reasons.items():
        if getattr(config, field):
            yield ConfigIssue(field, reason, "Switch it off")
    if config.dataset_on_device and config.num_workers:
        reason = "workers decode in their own processes"
        yield ConfigIssue("dataset_on_device", reason, "Set num_workers to 0")


def _copy_problems(config: RunConfig) -> Iterator[ConfigIssue]:
    for field in ("non_blocking", "copy_stream"):
        if getattr(config, field) and not config.pin_memory:
            reason = "only copies from pinned memory can overlap"
            yield ConfigIssue(field, reason, "Switch on pin_memory")
    if not config.dataset_on_device:
        return
    # pin_memory and non_blocking may stay on, as they are by default: they do nothing then.
    if config.copy_stream:
        reason = "with the dataset on the device no batch is copied"
        yield ConfigIssue("copy_stream", reason, "Switch off copy_stream or dataset_on_device")
    if config.num_workers:
        reason = "workers load batches on the host"
        yield ConfigIssue("dataset_on_device", reason, "Set num_workers to 0")
    if TRAITS[config.workload].decodes:
        reason = f"{config.workload} reads each sample from disk on demand"
        yield ConfigIssue("dataset_on_device", reason, "Switch it off")


def _without_workers(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.prefetch_factor != _DEFAULT_PREFETCH:
        yield ConfigIssue("prefetch_factor", "only workers prefetch", "Set num_workers above 0")
    if not config.persistent_workers:
        reason = "there are no workers to keep alive"
        yield ConfigIssue("persistent_workers", reason, "Switch it on, or set num_workers above 0")


_DEFAULT_PREFETCH = RunConfig().prefetch_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDevice:
    """A device that training could use; made by `trainer.devices.list_devices`.

    `reason` is None when torch can train on it, else the sentence why not; `compile_reason` says
    the same of torch.compile, `connection_reason` of ranks on such devices that exchange gradients.
    """

    id: str  # "cpu" or the GPU's UUID, as NVML prints it
    name: str
    memory_total: int  # bytes
    cuda_index: int | None = None  # torch's index, after CUDA_VISIBLE_DEVICES
    compute_capability: tuple[int, int] | None = None
    reason: str | None = None
    compile_reason: str | None = None
    connection_reason: str | None = None


def validate(config: RunConfig, devices: Sequence[TrainDevice]) -> tuple[ConfigIssue, ...]:
    """Every reason why this configuration cannot start on these devices; empty when it can."""
    device = next((device for device in devices if device.id == config.device), None)
    if device is None:
        return (
            ConfigIssue(
                "device", f"this machine has no device {config.device}", "Choose another device"
            ),
        )
    found = [
        ConfigIssue("device", device.reason, "Choose another device") if device.reason else None,
        _precision_problem(config.precision, device),
        *step_problems(
            config, on_gpu=device.cuda_index is not None, compile_reason=device.compile_reason
        ),
        *loading_problems(config, on_gpu=device.cuda_index is not None),
        *parallel_problems(
            config, gpus=_gpus(device, devices), connection=device.connection_reason
        ),
    ]
    return tuple(problem for problem in found if problem is not None)


def choice_problem(
    field: str, value: Any, config: RunConfig, devices: Sequence[TrainDevice]
) -> ConfigIssue | None:
    """Why `field` could not be `value` with the rest as it is: what disables a sidebar option."""
    try:
        candidate = replace(config, **{field: value})
    except ConfigError as error:
        return error.problem
    return next((p for p in validate(candidate, devices) if p.field == field), None)


def _gpus(device: TrainDevice, devices: Sequence[TrainDevice]) -> int:
    """Return how many GPUs can train beside this one, itself included; 0 for a CPU."""
    usable = [one for one in devices if one.cuda_index is not None and one.reason is None]
    return 0 if device.cuda_index is None else len(usable)


def _precision_problem(precision: Precision, device: TrainDevice) -> ConfigIssue | None:
    capability = device.compute_capability
    if capability is None:
        # Autocast to bf16 and fp16 works on every CPU, slowly without instructions for it.
        reason = {
            Precision.TF32: "TF32 needs NVIDIA tensor cores",
            Precision.PURE_FP16: "pure FP16 needs a GPU: most CPUs have no FP16 arithmetic",
        }.get(precision)
        return ConfigIssue("precision", reason, "Choose fp32, bf16 or fp16") if reason else None
    needed = {
        Precision.TF32: (8, 0),
        Precision.BF16: (8, 0),
        Precision.PURE_BF16: (8, 0),
        Precision.FP16: (5, 3),
        Precision.PURE_FP16: (5, 3),
    }
    least = needed.get(precision, (0, 0))
    if capability >= least:
        return None
    return ConfigIssue(
        "precision",
        f"{precision} needs compute capability {least[0]}.{least[1]}, "
        f"{device.name} has {capability[0]}.{capability[1]}",
        "Choose fp16 or fp32" if capability >= (5, 3) else "Choose fp32",
    )
