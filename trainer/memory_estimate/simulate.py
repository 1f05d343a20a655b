"""Simulates a run on fake tensors and returns every allocation on its device.

The code of a run is called (`prepare`, `TrainState`, `TrainStep`), so every setting has its effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.config import CompileMode, RunConfig
from trainer.memory_estimate.allocation_tracker import (
    AllocationCategory,
    AllocationEvent,
    AllocationTracker,
)
from trainer.memory_estimate.fake import as_on, attention_on, fake_task
from trainer.memory_estimate.step_simulator import StepSimulator
from trainer.memory_estimate.workspaces import workspaces_of
from trainer.training.accelerator import Accelerator, CpuAccelerator, CudaAccelerator
from trainer.training.backend_flags import run_flags
from trainer.training.model import prepare
from trainer.workload_traits import TRAITS
from trainer.workloads.task import Task, TensorSplit

HAS_CUDA = torch.version.cuda is not None
"""True if this torch was built for CUDA, with or without a GPU."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The allocations of a run on its device, with their categories.

    `data_bytes` is the dataset in host memory, 0 if it is read from files, and `samples` its
    length; `notes` name memory that is not predicted.
    """

    events: Sequence[AllocationEvent]
    parts: dict[int, AllocationCategory]
    data_bytes: int
    batch_bytes: int
    samples: int
    notes: tuple[str, ...] = ()


class _Absent(CudaAccelerator):
    """A CUDA device that may be absent.

    Torch without CUDA cannot train on fake CUDA tensors: they are on the host then.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")

    def rng_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


def simulate_step(config: RunConfig, capability: tuple[int, int] | None) -> SimulatedStep:
    """Simulate a run on a GPU of this `capability`, None for a CPU.

    Raises the workload's errors for unusable data and settings. Patches torch, so the process must
    be dedicated.
    """
    compute: Accelerator = CpuAccelerator() if capability is None else _Absent()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
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
        tracker = AllocationTracker(compute.device, workspaces_of(config, capability))
        stack.enter_context(tracker)
        StepSimulator(config, task, model, compute, tracker, train, validation).run()
        return SimulatedStep(
            tuple(tracker.events),
            tracker.parts,
            _data_bytes(task),
            sum(part.nbytes for part in train),
            task.train.length,
            _notes(config, capability),
        )


def _data_bytes(task: Task) -> int:
    """Return the bytes of all storages, each counted once: windows of a text share one."""
    splits = (split for split in (task.train, task.validation) if isinstance(split, TensorSplit))
    storages = [
        part.untyped_storage() for split in splits for part in (split.inputs, split.targets)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _notes(config: RunConfig, capability: tuple[int, int] | None) -> tuple[str, ...]:
    on_gpu = capability is not None
    notes = {
        "torch.compile changes which activations are kept; this estimate is for the "
        "uncompiled model.": (config.compile_mode is not CompileMode.NONE),
        "cuDNN workspaces are not included.": (on_gpu and TRAITS[config.workload].convolutions),
        "This PyTorch has no CUDA: dtypes and activations follow CPU rules.": (
            on_gpu and not HAS_CUDA
        ),
        "Driver memory for the graphs themselves is not included.": (on_gpu and config.cuda_graphs),
    }
    return tuple(note for note, applies in notes.items() if applies)
