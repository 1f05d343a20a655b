"""Which settings a device cannot run, and why, before anything starts. Pure; no torch import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import ConfigError, Precision, Problem, RunConfig
from trainer.loading_problems import loading_problems
from trainer.step_validation import step_problems
from trainer.strategy_validation import parallel_problems


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


def problems(config: RunConfig, devices: Sequence[TrainDevice]) -> tuple[Problem, ...]:
    """Every reason why this configuration cannot start on these devices; empty when it can."""
    device = next((device for device in devices if device.id == config.device), None)
    if device is None:
        return (
            Problem("device", f"{config.device} is not in this machine", "Choose another device"),
        )
    found = [
        Problem("device", device.reason, "Choose another device") if device.reason else None,
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
) -> Problem | None:
    """Why `field` could not be `value` with the rest as it is: what disables a sidebar option."""
    try:
        candidate = replace(config, **{field: value})
    except ConfigError as error:
        return error.problem
    return next((p for p in problems(candidate, devices) if p.field == field), None)


def _gpus(device: TrainDevice, devices: Sequence[TrainDevice]) -> int:
    """Return how many GPUs can train beside this one, itself included; 0 for a CPU."""
    usable = [one for one in devices if one.cuda_index is not None and one.reason is None]
    return 0 if device.cuda_index is None else len(usable)


def _precision_problem(precision: Precision, device: TrainDevice) -> Problem | None:
    capability = device.compute_capability
    if capability is None:
        # Autocast to bf16 and fp16 works on every CPU, slowly without instructions for it.
        reason = {
            Precision.TF32: "TF32 is a mode of NVIDIA tensor cores",
            Precision.PURE_FP16: "pure fp16 is for GPUs: most CPUs have no arithmetic for it",
        }.get(precision)
        return Problem("precision", reason, "Choose fp32, bf16 or fp16") if reason else None
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
    return Problem(
        "precision",
        f"{precision} needs compute capability {least[0]}.{least[1]}, "
        f"{device.name} has {capability[0]}.{capability[1]}",
        "Choose fp16 or fp32" if capability >= (5, 3) else "Choose fp32",
    )
