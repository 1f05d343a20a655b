"""Simulates a run on fake tensors and returns every allocation on its device.

The code of a run is called (`prepare`, `TrainState`, `TrainStep`), so every setting has its effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.config import CompileMode, RunConfig
from trainer.config_validation import TRAITS
from trainer.memory_estimate.allocator import (
    EMPTY_CACHE,
    WAITING,
    AllocationCategory,
    AllocationEvent,
    AllocationTracker,
    workspaces_of,
)
from trainer.memory_estimate.fake import as_on, attention_on, fake_task, replaced
from trainer.training.accelerator import RUN_AHEAD, Accelerator, CpuAccelerator, CudaAccelerator
from trainer.training.model import prepare
from trainer.training.precision import run_flags
from trainer.training.state import TrainState
from trainer.training.step import TrainStep, build_train_step
from trainer.training.warmup import WARMUP_STEPS, run_optimizer_step
from trainer.workloads.task import Batch, Task, TensorSplit

HAS_CUDA = torch.version.cuda is not None
"""True if this torch was built for CUDA, with or without a GPU."""
STEPS = 2  # the first creates the optimizer's state
MAX_MICRO_BATCHES = 3  # later ones need the same memory
GENERATOR_BYTES = 5056  # of the host generator's state
GRAPH, COPY = "graph", "copy"  # pools of the allocator: CUDA graphs, the stream of copies


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The allocations of a run on its device, with their categories.

    `data_bytes` is the dataset in host memory, `samples` its length; `notes` name what is missing.
    """

    events: Sequence[AllocationEvent]
    parts: dict[int, AllocationCategory]
    data_bytes: int
    batch_bytes: int
    samples: int
    notes: tuple[str, ...] = ()


class _Absent(CudaAccelerator):
    """A CUDA device that may be absent; with a torch without CUDA its tensors are on the host."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")

    def rng_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)


def simulate_step(config: RunConfig, capability: tuple[int, int] | None) -> SimulatedStep:
    """Simulate a run on a GPU of this `capability`, None: a CPU. Raises the workload's errors."""
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


@dataclass(slots=True)
class StepSimulator:
    """Simulates one run; `train_room` and `validation_room` are its largest batches.

    Repeats how the loop holds its batches (`loop.py`), and the allocations of CUDA graphs
    (`cuda_graph_step.py`, which needs a device for the capture).
    """

    config: RunConfig
    task: Task
    model: nn.Module
    compute: Accelerator
    tracker: AllocationTracker
    train_room: Batch
    validation_room: Batch
    step: TrainStep = field(init=False)
    _kept: list[object] = field(default_factory=list, init=False)

    def run(self) -> None:
        """Simulate from the model's move to the device to the first validation."""
        for tensor in _once(self.model):
            self.tracker.note(tensor, AllocationCategory.PARAMETERS)
        with replaced(self.tracker, "part", AllocationCategory.OPTIMIZER_STATE):
            training = TrainState(self.config, self.model, self.compute)
        scaler = training.scaler  # must not skip a step, as gradients have no values
        scaler._maybe_opt_step = lambda optimizer, _: optimizer.step()  # type: ignore
        self.step = build_train_step(training, self.task)
        self._watch(training.optimizer)
        on_gpu = self.compute.on_gpu
        if self.config.dataset_on_device and on_gpu:
            for split in (self.task.train, self.task.validation):
                if isinstance(split, TensorSplit):
                    for part in (split.inputs, split.targets):
                        self._take_input(part.numel() * part.element_size())
        if not on_gpu or self.config.dataset_on_device:
            # The permutation of an epoch's samples, and the host generator's state.
            self._take_input(8 * self.task.train.length)
            self._take_input(0 if on_gpu else GENERATOR_BYTES)
        if self.config.cuda_graphs and on_gpu:
            self._record(training)
        else:
            if self.config.copy_stream and on_gpu:
                # A copied batch stays reserved until the steps that may use it have ended.
                with replaced(self.tracker, "pool", WAITING):
                    for part in self.train_room * RUN_AHEAD:
                        self._take_input(part.nbytes)
            for _ in range(STEPS):
                self._train_step()
        self._validate()

    def _take_input(self, size: int) -> None:
        self.tracker.take(size, AllocationCategory.INPUTS)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        tracker = self.tracker

        def before(*_: object) -> None:
            tracker.part = AllocationCategory.TEMPORARY

        def after(*_: object) -> None:
            tracker.part = None
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        tracker.note(value, AllocationCategory.OPTIMIZER_STATE)

        def note_gradient(weights: Tensor) -> None:
            if weights.grad is not None:
                tracker.note(weights.grad, AllocationCategory.GRADIENTS)

        after()
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        for weights in self.model.parameters():
            if weights.requires_grad:
                weights.register_post_accumulate_grad_hook(note_gradient)  # type: ignore[no-untyped-call]

    def _batch(self, room: Batch) -> Batch:
        copied = self.config.copy_stream and self.compute.on_gpu
        with (
            replaced(self.tracker, "part", AllocationCategory.INPUTS),
            replaced(self.tracker, "pool", COPY if copied else ""),
        ):
            inputs, targets = (
                torch.empty(part.shape, dtype=part.dtype, device=self.compute.device)
                for part in room
            )
        return inputs, targets

    def _train_step(self) -> None:
        accumulation = self.config.gradient_accumulation_steps
        count = min(accumulation, MAX_MICRO_BATCHES)
        for number in range(1, count + 1):
            # The previous batch is held until this one exists.
            inputs, targets = self._batch(self.train_room)
            of = len(targets) * accumulation if count > 1 else 0
            loss, norm = self.step(inputs, targets, of, number == count)
        del loss, norm

    @torch.no_grad()
    def _validate(self) -> None:
        self.model.eval()
        for _ in range(2 if self.task.validation.length > self.config.batch_size else 1):
            inputs, targets = self._batch(self.validation_room)
            outputs, loss = self.step.evaluate(inputs, targets)
        self.model.train()
        del outputs, loss

    def _record(self, training: TrainState) -> None:
        """Simulate warm-up steps, then the captured step in its pool, whose gradients stay."""
        accumulation = self.config.gradient_accumulation_steps
        count = min(accumulation, MAX_MICRO_BATCHES)
        batch = self._batch(self.train_room)
        for _ in range(WARMUP_STEPS):
            run_optimizer_step(self.step, batch, count)
        with replaced(self.tracker, "part", AllocationCategory.INPUTS):
            inputs, targets = (part.clone() for part in batch)
        training.optimizer.zero_grad(set_to_none=True)
        self.tracker.events.append(AllocationEvent(EMPTY_CACHE, 0))
        of = len(targets) * accumulation if accumulation > 1 else 0
        with replaced(self.tracker, "pool", GRAPH):
            for number in range(1, count + 1):
                loss = self.step.forward(inputs, targets, of)
                self.step.backward(loss)
                norm = self.step.apply() if number == count else None
                self._kept.append((loss.detach(), norm))
                del loss
        del batch
        self._kept.append((inputs, targets))
        for _ in range(STEPS):
            self._batch(self.train_room)


def _once(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in the order of `Module.to`."""
    for child in model.children():
        yield from _once(child)
    yield from model.parameters(recurse=False)
    yield from model.buffers(recurse=False)
