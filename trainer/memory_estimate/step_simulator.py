"""The order of a run's allocations: model, optimizer, steps, validation.

The step is the run's own. Told again here is only how the loop holds its batches (`loop.py`), and
what CUDA graphs allocate (`cuda_graph_step.py`, which needs a device to record one).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.memory_estimate.allocation_tracker import Event, Part, Tracker
from trainer.memory_estimate.peak import EMPTY_CACHE, WAITING
from trainer.training.accelerator import RUN_AHEAD, Compute
from trainer.training.state import Training
from trainer.training.step import TrainStep, step_of
from trainer.training.warmup import WARMUP_STEPS, whole_step
from trainer.workloads.task import Batch, Task, TensorSplit

STEPS = 2
"""In the first the optimizer makes its state, in the second it is there from the beginning."""
MICRO_BATCHES = 3
"""Batches of one step that are played at most: those after the second need what the second did."""
GENERATOR = 5056
"""Bytes of the state of torch's generator on the host."""
GRAPH, COPY = "graph", "copy"
"""Pools of the allocator: that of CUDA graphs, and that of the stream of copies."""


@dataclass(slots=True)
class Player:
    """Plays one run; `train_room` and `validation_room` have the form of the largest batches."""

    config: RunConfig
    task: Task
    model: nn.Module
    compute: Compute
    tracker: Tracker
    train_room: Batch
    validation_room: Batch
    step: TrainStep = field(init=False)
    _kept: list[object] = field(default_factory=list, init=False)

    def run(self) -> None:
        """Play it from the model's arrival on the device to the first validation."""
        for tensor in _once(self.model):
            self.tracker.note(tensor, Part.PARAMETERS)
        with self.tracker.for_part(Part.OPTIMIZER_STATE):
            training = Training(self.config, self.model, self.compute)
        _never_skip(training.scaler)
        self.step = step_of(training, self.task)
        self._watch(training.optimizer)
        if self.config.data_on_device and self.compute.on_gpu:
            self._move_data()
        if not self.compute.on_gpu or self.config.data_on_device:
            # The order of an epoch's samples, and on the host the generator's state.
            self.tracker.take(8 * self.task.train.length, Part.INPUTS)
            self.tracker.take(0 if self.compute.on_gpu else GENERATOR, Part.INPUTS)
        if self.config.cuda_graphs and self.compute.on_gpu:
            self._record(training)
        else:
            if self.config.copy_stream and self.compute.on_gpu:
                self._hold_back_batches()
            for _ in range(STEPS):
                self._train_step()
        self._validate()

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn which memory is gradients and which is the optimizer's."""
        tracker = self.tracker

        def before(*_: object) -> None:
            tracker.part = Part.TEMPORARY

        def after(*_: object) -> None:
            tracker.part = None
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        tracker.note(value, Part.OPTIMIZER_STATE)

        after()
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        for weights in self.model.parameters():
            if weights.requires_grad:
                weights.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._note_gradient
                )

    def _note_gradient(self, weights: Tensor) -> None:
        if weights.grad is not None:
            self.tracker.note(weights.grad, Part.GRADIENTS)

    def _move_data(self) -> None:
        for split in (self.task.train, self.task.validation):
            if isinstance(split, TensorSplit):
                for part in (split.inputs, split.targets):
                    self.tracker.take(part.numel() * part.element_size(), Part.INPUTS)

    def _batch(self, room: Batch) -> Batch:
        """A batch that has arrived on the device."""
        copied = self.config.copy_stream and self.compute.on_gpu
        with self.tracker.for_part(Part.INPUTS), self._in_pool(COPY if copied else ""):
            inputs, targets = (
                torch.empty(part.shape, dtype=part.dtype, device=self.compute.device)
                for part in room
            )
        return inputs, targets

    def _train_step(self) -> None:
        accumulation = self.config.accumulation
        count = min(accumulation, MICRO_BATCHES)
        for number in range(1, count + 1):
            # The batch before is held until this one has come.
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

    def _hold_back_batches(self) -> None:
        """A copied batch stays reserved until the steps that may use it have ended."""
        with self._in_pool(WAITING):
            for part in self.train_room:
                for _ in range(RUN_AHEAD):
                    self.tracker.take(part.nbytes, Part.INPUTS)

    def _record(self, training: Training) -> None:
        """Steps to warm up, then the step in a pool of its own, whose gradients stay."""
        accumulation = self.config.accumulation
        count = min(accumulation, MICRO_BATCHES)
        batch = self._batch(self.train_room)
        for _ in range(WARMUP_STEPS):
            whole_step(self.step, batch, count)
        with self.tracker.for_part(Part.INPUTS):
            inputs, targets = (part.clone() for part in batch)
        training.optimizer.zero_grad(set_to_none=True)
        self.tracker.events.append(Event(EMPTY_CACHE, 0))
        of = len(targets) * accumulation if accumulation > 1 else 0
        with self._in_pool(GRAPH):
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

    @contextmanager
    def _in_pool(self, pool: str) -> Iterator[None]:
        former, self.tracker.pool = self.tracker.pool, pool
        try:
            yield
        finally:
            self.tracker.pool = former


def _once(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in the order in which `Module.to` moves them."""
    for child in model.children():
        yield from _once(child)
    yield from model.parameters(recurse=False)
    yield from model.buffers(recurse=False)


def _never_skip(scaler: torch.amp.GradScaler) -> None:
    """Have the scaler update the weights without a look at the gradients, which have no values."""

    def step(optimizer: torch.optim.Optimizer, state: object) -> None:
        optimizer.step()

    scaler._maybe_opt_step = step  # type: ignore[method-assign, assignment]
