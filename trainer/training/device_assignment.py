"""The devices of this machine that a process trains on and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepscope.gpu.source import DeviceSource, NullSource, open_source
from stepscope.session.session import GpuEntry, gpu_entry
from trainer.config import RunConfig, Strategy
from trainer.config_validation import TrainDevice, validate
from trainer.devices import list_devices
from trainer.error_messages import RunFailedError
from trainer.training.rank_info import TrainerRank


def assigned_devices(config: RunConfig, ranks: TrainerRank) -> list[TrainDevice]:
    """Return the device to train on, followed by the other devices of the run on this machine.

    A rank on GPUs gets the GPU with its local rank as index, as `device` names a GPU of one
    machine. Raises RunFailedError for an issue of `validate`.
    """
    found = list_devices()
    if config.distributed and config.device != "cpu":
        gpus = {gpu.cuda_index: gpu for gpu in found if gpu.cuda_index is not None}
        if len(gpus) < ranks.local_size:
            raise RunFailedError(_too_few(len(gpus), config))
        used = [gpus[index] for index in range(ranks.local_size)]
        device = used[ranks.local_rank]
        _check(replace(config, device=device.id), found)
        return [device, *(other for other in used if other is not device)]
    _check(config, found)
    device = next(device for device in found if device.id == config.device)
    if config.strategy is not Strategy.DP:
        return [device]
    others = [gpu for gpu in found if gpu.cuda_index is not None and gpu.reason is None]
    others = sorted(
        (gpu for gpu in others if gpu is not device), key=lambda gpu: gpu.cuda_index or 0
    )
    if len(others) + 1 < config.devices_per_node:
        raise RunFailedError(_too_few(len(others) + 1, config))
    return [device, *others[: config.devices_per_node - 1]]


def sampled_by(ranks: TrainerRank) -> DeviceSource:
    """Return the source of GPU readings: local rank 0 samples all GPUs of its machine."""
    if ranks.local_rank:
        return NullSource("Rank 0 of this machine samples its GPUs.")
    return open_source()


def sampled(devices: Sequence[TrainDevice], source: DeviceSource) -> list[GpuEntry]:
    """Return the GPUs to sample, sorted by index; empty on a CPU and without NVML."""
    if source.reason is not None:
        return []
    totals = {info.uuid: info.memory_total for info in source.devices()}
    gpus = [device for device in devices if device.cuda_index is not None]
    return [
        # NVML lists no MIG instance among its devices, but reads one by its UUID.
        gpu_entry(gpu.id, gpu.name, totals.get(gpu.id, gpu.memory_total))
        for gpu in sorted(gpus, key=lambda gpu: gpu.cuda_index or 0)
    ]


def _check(config: RunConfig, devices: Sequence[TrainDevice]) -> None:
    if issues := validate(config, devices):
        raise RunFailedError(str(issues[0]))


def _too_few(count: int, config: RunConfig) -> str:
    return (
        f"devices_per_node: each rank needs its own GPU, and torch can use {count} of this "
        f"machine, got {config.devices_per_node}. Lower it to {max(1, count)}."
    )
