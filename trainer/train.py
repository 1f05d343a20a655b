"""The recipe of a run: what it builds, then epochs of forward, backward and optimizer step.

`runners/training_run.py` opens the run, connects its ranks, and turns a failure into its reason.
`training/` has a file for each technique. The loop does not wait for losses: they arrive later
(`stepscope/store/cuda_readback.py`). It synchronizes with a GPU only at the end of an epoch, for
commands, and in `CudaAccelerator.pace`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stepscope.common.clock import clock
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER, span
from stepscope.session.command_server import CommandServer
from stepscope.session.sampler import Sampler
from stepscope.session.session import Session
from trainer.config import RunConfig
from trainer.training.accelerator import Accelerator, Reader
from trainer.training.commands import TrainerCommands
from trainer.training.config_validation import TrainDevice
from trainer.training.cuda_graph_step import capture_step
from trainer.training.flops import FlopsMeter
from trainer.training.fsdp import casts_weights, reshard, whole
from trainer.training.loaders import Loader, make_loader
from trainer.training.model import InputFormat, ParallelModel, compiled, prepare
from trainer.training.precision import autocast, run_flags
from trainer.training.rank_info import TrainerRank, TrainPhaseTimer
from trainer.training.run_log import RunLog, observe_memory
from trainer.training.state import TrainState
from trainer.training.warmup import StepFunction, full_batch_size, run_warmup
from trainer.workloads.build import build_task
from trainer.workloads.task import Batch, LossFunction, Task


def train(
    config: RunConfig,
    session: Session,
    sampler: Sampler,
    *,
    devices: Sequence[TrainDevice],
    compute: Accelerator,
    ranks: TrainerRank,
    stop: threading.Event,
    at_boundary: Callable[[TrainState], None],
) -> None:
    """Build everything that a run needs, in execution order, and train to the end.

    The first of the `devices` is that of this process; DataParallel uses more. `at_boundary` is
    called between two steps and between the batches of a validation. Raises RunStoppedError,
    NonFiniteLossError, RunFailedError, and what the model raises.
    """
    recorder = session.recorder
    # TF32, cudnn.benchmark, deterministic algorithms.
    with run_flags(config), ExitStack() as stack:
        # The model, with initial weights from the seed; its data and loss.
        torch.manual_seed(config.seed)
        task = build_task(config)
        speed = FlopsMeter.of(task, config, devices[0])
        model = prepare(task.model, config, compute.device, ranks)

        # Optimizer, learning rate and GradScaler, from the checkpoint if there is one.
        training = TrainState(config, model, compute, ranks, task.train.length)
        log = RunLog(recorder, training, task, speed)
        if config.resume_from:
            log.resume(config.resume_from)
        log.describe(devices[0])
        observe_memory(session, sampler, training)

        # DataParallel or DistributedDataParallel around the model, then torch.compile around both.
        parallel = ParallelModel.of(model, config, devices)
        phases = TrainPhaseTimer(parallel.model) if ranks.distributed else None
        ranks.begin_random(config.seed, training.step)
        full = full_batch_size(task.train, config)
        forward = stack.enter_context(compiled(parallel.model, config, compute.device, full))

        # Commands of the dashboard, then the data loaders.
        handlers = TrainerCommands(recorder, training, stop, at_boundary)
        commands = stack.enter_context(closing(handlers.serve(session, sampler)))
        loading = ranks.seeded(config)
        loader = stack.enter_context(closing(make_loader(task.train, loading, compute)))
        validation_loader = make_loader(task.validation, loading, compute, validation=True)
        stack.enter_context(closing(validation_loader))

        # The optimizer step, its warm-up or CUDA Graphs, and the epochs.
        step = build_train_step(training, task, forward, parallel.no_sync)
        run_warmup(training, step, step.evaluate, task, recorder)
        step = replace(step, phases=phases)  # the times of the warm-up belong to no step
        trained: StepFunction = step
        if config.cuda_graphs:
            trained = capture_step(step.train_batch, training, task.train, recorder)
        TrainLoop(
            task=task,
            training=training,
            step=trained,
            evaluate=step.evaluate,
            loader=loader,
            validation_loader=validation_loader,
            reader=compute.reader(log.record_step),
            log=log,
            commands=commands,
            phases=phases,
        ).train()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """An optimizer step; call it with each of its micro-batches on the device."""

    model: nn.Module
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: AbstractContextManager[object]
    max_grad_norm: float
    form: InputFormat
    set_to_none: bool
    wrapped: Callable[[Tensor], Tensor]
    """The model with DDP or torch.compile, for training; validation runs `model`."""
    no_sync: Callable[[], AbstractContextManager[object]]
    """Context of all micro-batches but the last: ranks do not average gradients."""
    phases: TrainPhaseTimer | None = None  # only with several ranks

    def __call__(
        self, inputs: Tensor, targets: Tensor, of: int = 0, last: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Train on a micro-batch; return its share of the loss and, with clipping, the norm.

        `of` is the number of samples of the optimizer step (0: those of this batch). The shares of
        the micro-batches add up to the mean loss over them, and so do the gradients. The `last`
        micro-batch updates the weights and returns the gradient norm (0-d).
        """
        began_s = time.perf_counter()
        with nullcontext() if last else self.no_sync():
            loss = self.forward(inputs, targets, of)
            forwarded_s = time.perf_counter()
            self.backward(loss)
        ended_s = time.perf_counter()
        norm = None
        if last:
            with span(OPTIMIZER):
                norm = self.update()
                self.optimizer.zero_grad(set_to_none=self.set_to_none)
        if self.phases is not None:
            self.phases.add(began_s, forwarded_s, ended_s)
        return loss.detach(), norm

    def forward(self, inputs: Tensor, targets: Tensor, of: int = 0) -> Tensor:
        """Return the mean loss of a batch (0-d), or its share of the mean over `of` samples."""
        with span(FORWARD):
            _, loss = self.evaluate(inputs, targets, model=self.wrapped)
            return loss * (len(targets) / of) if of > len(targets) else loss

    def backward(self, loss: Tensor) -> None:
        with span(BACKWARD):
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> Tensor | None:
        """Update the weights; return the norm of the gradients (0-d) with clipping."""
        norm = self._clip() if self.max_grad_norm > 0 else None
        # optimizer.step(). fp16: skips a step with infinite gradients; only a fused optimizer needs
        # no sync for that.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def train_batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Train on a batch, which is a whole step, and keep the gradients, for CUDA Graphs."""
        loss = self.forward(inputs, targets)
        self.backward(loss)
        return loss.detach(), self.update()

    def evaluate(
        self,
        inputs: Tensor,
        targets: Tensor,
        counted: int | None = None,
        model: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and mean loss (0-d) of the first `counted` samples; by default `model`'s.

        The outputs are those of all samples.
        """
        with self.autocast:
            # Not `or`: a compiled model may have a length and thereby be falsy.
            model = self.model if model is None else model
            outputs = model(self.form(inputs))
            if self.form.dtype is not None:
                outputs = outputs.float()  # a 16-bit loss would round sums over the batch
            return outputs, self.loss(outputs[:counted], targets[:counted])

    def _clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)  # the limit applies to unscaled gradients
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))


def build_train_step(
    training: TrainState,
    task: Task,
    forward: Callable[[Tensor], Tensor] | None = None,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> TrainStep:
    """Return the optimizer step of a configuration; `forward` is the wrapped model."""
    config = training.config
    casts = casts_weights(training.model, config)
    return TrainStep(
        model=training.model,
        loss=task.loss,
        optimizer=training.optimizer,
        scaler=training.scaler,
        autocast=nullcontext() if casts else autocast(config.precision, training.compute.device),
        max_grad_norm=config.max_grad_norm,
        form=InputFormat.of(config),
        set_to_none=config.set_to_none,
        wrapped=training.model if forward is None else forward,
        no_sync=no_sync,
    )


@dataclass(kw_only=True)
class TrainLoop:
    """The epochs of a run; call `train`."""

    task: Task
    training: TrainState
    step: StepFunction
    evaluate: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    loader: Loader
    validation_loader: Loader
    reader: Reader
    log: RunLog
    commands: CommandServer
    phases: TrainPhaseTimer | None = None  # only with several ranks

    def train(self) -> None:
        """Train to the end. Raises NonFiniteLossError, and RunStoppedError after saving last.pt."""
        with self.log.closing(self.reader):
            while not self.training.has_ended:
                self.log.recorder.epoch = self.training.epoch
                began = time.perf_counter()
                self._train_epoch()
                with torch.no_grad():
                    loss, accuracy = self._validate()
                self._close_epoch(loss, accuracy, time.perf_counter() - began)

    def _train_epoch(self) -> None:
        training = self.training
        length = self.task.train.length
        batches = self.loader.batches(training.order(length))
        boundary = time.perf_counter()
        while training.offset < length and not training.has_ended:
            learning_rate = training.learning_rate
            scalars, samples, waited = self._train_step(batches, length - training.offset)
            now = time.perf_counter()
            row = self.log.step_row(samples, now - boundary)
            row |= {"train/lr": learning_rate, "perf/data_wait": waited}
            if self.phases is not None:
                row |= self.phases.take()
            self.reader.put(training.step, clock.now(), row, scalars | self.log.recorded())
            self.reader.poll()
            boundary = now + self.commands.serve(self.reader.flush)

    def _train_step(
        self, batches: Iterator[Batch], left: int
    ) -> tuple[dict[str, Tensor], int, float]:
        """Take an optimizer step of up to `left` samples, the rest of the epoch over all ranks.

        Returns loss and, with clipping, gradient norm by metric key, samples, and seconds waited.
        """
        training = self.training
        step_samples = min(left, training.config.step_size)
        samples = training.ranks.count(step_samples)
        count = math.ceil(samples / training.config.batch_size)
        loss: Tensor | None = None
        norm: Tensor | None = None
        waited = 0.0
        for number in range(1, count + 1):
            began = time.perf_counter()
            with span(DATA):
                inputs, targets = next(batches)
            waited += time.perf_counter() - began
            with training.compute.computing():
                of = samples if count > 1 else 0
                part, norm = self.step(inputs, targets, of, number == count)
            training.compute.pace()
            self.commands.read_if_requested()
            loss = part if loss is None else loss + part
        training.count(1, step_samples)
        scalars = {"train/loss": loss, "train/grad_norm": norm}
        computed = {key: value for key, value in scalars.items() if value is not None}
        return computed, samples, waited

    def _validate(self) -> tuple[float, float | None]:
        """Return the mean validation loss and the accuracy (percent) over all ranks."""
        self.reader.flush()
        split, model, ranks = self.task.validation, self.training.model, self.training.ranks
        device = self.training.compute.device
        loss_sum, correct = torch.zeros((), device=device), torch.zeros((), device=device)
        seen, left = 0, ranks.own(split.length)
        model.eval()
        ranks.copy_from_first(model.buffers())
        order = ranks.share(torch.arange(split.length))
        for inputs, targets in self.validation_loader.batches(order):
            # The last sample may be a repeated one, which pads the ranks and does not count.
            counted = min(len(targets), left - seen)
            seen += counted
            outputs, loss = self.evaluate(inputs, targets, counted)
            if counted:
                loss_sum += loss * counted
            if self.task.classifies:
                correct += (outputs[:counted].argmax(dim=1) == targets[:counted]).sum()
            self.training.compute.pace()
            if ranks.distributed:
                self.log.recorder.activity += 1  # no commands: the ranks are at different batches
            else:
                self.commands.serve(self.reader.flush)
        model.train()
        reshard(model)
        sums = torch.stack([loss_sum, correct]).double()
        # Rank 0's clock decides for all ranks, as they have to save together.
        due = not ranks.rank and self.log.is_save_due()
        sums = ranks.sum(torch.cat([sums, sums.new_tensor([seen, due])]))
        total, hits, number, save_due = sums.tolist()
        self.log.save_due = bool(save_due)
        accuracy = 100 * hits / number if self.task.classifies else None
        return total / number, accuracy

    def _close_epoch(self, loss: float, accuracy: float | None, seconds: float) -> None:
        training = self.training
        whole_epoch = training.offset >= self.task.train.length
        self.log.record_epoch(loss, accuracy, seconds, whole=whole_epoch)
        if whole_epoch:
            training.next_epoch()
        if loss < training.best_loss:
            training.best_loss = loss
            self.log.save("best.pt")
        # A model with NaN weights must not overwrite the last good checkpoint.
        if math.isfinite(loss) and (training.has_ended or self.log.save_due):
            self.log.save("last.pt")
