"""Plays a run on fake tensors and returns every allocation that it makes on its device.

What is called is the run's own code (`prepare`, `Training`, `TrainStep`), so that every setting has
the effect that it has in a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Compile, RunConfig
from trainer.memory_estimate.allocation_tracker import Event, Part, Tracker
from trainer.memory_estimate.attention import attention_on
from trainer.memory_estimate.fake import as_on, fake_mode, fake_task
from trainer.memory_estimate.step_simulator import Player
from trainer.memory_estimate.workspaces import scratch_of
from trainer.training.accelerator import Compute, CpuCompute, CudaCompute
from trainer.training.backend_flags import run_flags
from trainer.training.model import prepare
from trainer.workload_traits import TRAITS
from trainer.workloads.task import Task, TensorSplit

HAS_CUDA = torch.version.cuda is not None
"""Whether this torch was built for CUDA, with or without a GPU to run on."""


@dataclass(frozen=True, slots=True)
class Played:
    """The allocations of a run on its device, and what each was for."""

    events: Sequence[Event]
    parts: dict[int, Part]
    data_bytes: int
    """Of the data set in the host's memory; 0 where it is read from files."""
    batch_bytes: int
    samples: int
    """Of an epoch."""
    notes: tuple[str, ...] = ()
    """What is not part of the prediction."""


class _Absent(CudaCompute):
    """A CUDA device that is asked for nothing.

    Torch without CUDA cannot train on tensors of one, not even on fake ones: there they count as
    the host's, in the allocator of a GPU.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")

    def rng_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


def play(config: RunConfig, capability: tuple[int, int] | None) -> Played:
    """Play a run; `capability` is that of its GPU, None for a CPU.

    Raises what the workload raises for data and settings that cannot be used. Changes torch while
    it lasts, so the process should be one of its own.
    """
    compute: Compute = CpuCompute() if capability is None else _Absent()
    mode = fake_mode()
    with ExitStack() as stack:
        stack.enter_context(as_on(compute.device))
        stack.enter_context(run_flags(config))
        torch.manual_seed(config.seed)
        task = fake_task(config, mode, compute.device)
        if capability is not None and not torch.cuda.is_available():
            stack.enter_context(attention_on(capability))
        stack.enter_context(mode)
        train, validation = (
            split.room(min(config.batch_size, split.length))
            for split in (task.train, task.validation)
        )
        model = prepare(task.model, config, compute.device)
        tracker = Tracker(compute.device, scratch_of(config, capability))
        stack.enter_context(tracker)
        Player(config, task, model, compute, tracker, train, validation).run()
        return Played(
            tuple(tracker.events),
            tracker.parts,
            _data_bytes(task),
            sum(part.nbytes for part in train),
            task.train.length,
            _notes(config, capability),
        )


def _data_bytes(task: Task) -> int:
    """Windows of one text share its memory, so storages count, not tensors."""
    splits = (split for split in (task.train, task.validation) if isinstance(split, TensorSplit))
    storages = [
        part.untyped_storage() for split in splits for part in (split.inputs, split.targets)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _notes(config: RunConfig, capability: tuple[int, int] | None) -> tuple[str, ...]:
    found = []
    if config.compile is not Compile.NONE:
        found.append(
            "torch.compile changes which activations are kept; this estimate is for the "
            "uncompiled model."
        )
    if capability is not None and TRAITS[config.workload].convolutions:
        found.append("cuDNN workspaces are not included.")
    if capability is not None and not HAS_CUDA:
        found.append("This PyTorch has no CUDA: dtypes and activations follow CPU rules.")
    if capability is not None and config.cuda_graphs:
        found.append("Driver memory for the graphs themselves is not included.")
    return tuple(found)
