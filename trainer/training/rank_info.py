"""The rank of this process: its share of the samples, its devices, and the process group."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTiming
from stepscope.distributed.rendezvous import launch
from stepscope.gpu.source import DeviceSource, NullSource, open_source
from stepscope.session.session import GpuEntry, gpu_entry
from stepscope.store.cuda_readback import MetricRow
from stepscope.watch.hooks.patching import HookGuard
from trainer.config import RunConfig, Strategy
from trainer.errors import RunFailedError
from trainer.training.config_validation import TrainDevice, validate
from trainer.training.devices import list_devices

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """torchrun's rank numbers of this process; by default a single process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 1

    @classmethod
    def of(cls, config: RunConfig, environ: Mapping[str, str]) -> TrainerRank:
        """Return the rank from torchrun's environment variables, if the run is distributed."""
        if not config.distributed:
            return cls()
        env = launch(environ)
        return cls(env.rank, env.local_rank, env.world_size, env.local_world_size or 1)

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    def share(self, order: Tensor, offset: int = 0) -> Tensor:
        """Return this rank's samples of an epoch's `order` (int64, 1-d) after the first `offset`.

        Ranks get equally many samples: the order repeats from its start if too few are left. With
        offset 0 this equals torch's DistributedSampler. The k-th batches of all ranks together are
        the k-th batch of a single process with `world_size` times the batch size.
        """
        if not self.distributed:
            return order[offset:]
        places = torch.arange(self.count(len(order) - offset)) * self.world_size
        return order[(places + offset + self.rank) % len(order)]

    def count(self, samples: int) -> int:
        """Return each rank's number of `samples` samples, repeated ones included."""
        return -(-samples // self.world_size)

    def own(self, samples: int) -> int:
        """Return this rank's number of `samples` samples, without repeated ones."""
        return len(range(self.rank, samples, self.world_size))

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values over all ranks in place; all ranks must call this."""
        if self.distributed:
            dist.all_reduce(values)
        return values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from rank 0 in place; all ranks must call this."""
        if self.distributed:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def begin_random(self, seed: int, step: int) -> None:
        """Seed each of several ranks differently, for example for dropout.

        Initial weights have one seed; rank 0 of a resumed run keeps the checkpoint's RNG state.
        """
        if not self.distributed or (step and not self.rank):
            return
        later = np.random.SeedSequence((seed, self.rank, step)).generate_state(1)[0]
        torch.manual_seed(int(later) if step else seed + self.rank)

    def seeded(self, config: RunConfig) -> RunConfig:
        """Return the configuration with a different seed per rank, for its data loaders."""
        return replace(config, seed=(config.seed + self.rank) % 2**31)


ALONE = TrainerRank()


def init_process_group(config: RunConfig, ranks: TrainerRank, device: torch.device) -> None:
    """Initialize NCCL or gloo, and wait for all ranks. Raises RunFailedError for a wrong number."""
    if not config.distributed or dist.is_initialized():
        return
    if ranks.world_size != config.world_size or "MASTER_ADDR" not in os.environ:
        raise RunFailedError(
            f"devices_per_node: the settings are for {config.world_size} processes, got "
            f"{ranks.world_size}. Start devices_per_node processes with torchrun."
        )
    if device.type == "cpu":
        dist.init_process_group("gloo")
        return
    dist.init_process_group("nccl", device_id=device)


def destroy_process_group() -> None:
    """Destroy the process group, if there is one and no rank is inside a collective.

    After a failure, ranks inside a collective would block gloo's destruction and abort. Then the
    process must end by os._exit: gloo's ranks get an error at once, torchrun ends those of NCCL.
    """
    if not dist.is_initialized():
        return
    try:
        dist.destroy_process_group()
    except RuntimeError as error:  # another rank has failed; this rank is complete
        log.warning("the process group was not destroyed: %s", error)


def assigned_devices(config: RunConfig, ranks: TrainerRank) -> list[TrainDevice]:
    """Return the device to train on, then the run's other devices here. Raises RunFailedError.

    A rank gets the GPU with its local rank as index, as `device` names a GPU of one machine.
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


class TrainPhaseTimer:
    """Sums forward, backward and optimizer times of a step's micro-batches, to find stragglers."""

    def __init__(self, model: nn.Module) -> None:
        self._forward_s = 0.0
        self._backward_s = 0.0
        self._optimizer_s = 0.0
        self._ddp = DdpTiming()
        self._guard = HookGuard(DDP_METRICS)
        if isinstance(model, DistributedDataParallel):
            self._ddp.attach(model)

    def add(self, began_s: float, forwarded_s: float, ended_s: float) -> None:
        """Add a micro-batch by its host times in seconds; its update ends now."""
        self._forward_s += forwarded_s - began_s
        self._backward_s += ended_s - forwarded_s
        self._optimizer_s += time.perf_counter() - ended_s

    def take(self) -> MetricRow:
        """Return the times of the step in seconds by metric key, and reset them."""
        row: MetricRow = {
            "perf/forward": self._forward_s,
            "perf/backward": self._backward_s,
            "perf/optimizer": self._optimizer_s,
        }
        self._forward_s = 0.0
        self._backward_s = 0.0
        self._optimizer_s = 0.0
        self._guard.call(self._ddp.add, row, time.perf_counter())
        return row
