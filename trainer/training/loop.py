"""The training loop: epochs of optimizer steps, a validation after each epoch, a row per step.

The loop does not wait for losses: they arrive later (`stepscope/recorder/cuda_readback.py`). It
synchronizes with a GPU only at the end of an epoch, for commands, and in `CudaAccelerator.pace`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepscope.common.clock import clock
from stepscope.common.formatting import format_bytes
from stepscope.profiling.phase_ranges import DATA, span
from stepscope.recorder.cuda_readback import MetricRow
from stepscope.recorder.recorder import Command, CommandName, Recorder
from stepscope.run import RunStatus
from stepscope.session.command_server import CommandHandler, CommandServer
from trainer.config import NanPolicy, RunConfig, Strategy
from trainer.error_messages import NonFiniteLossError, nan_remedy
from trainer.training.accelerator import Reader
from trainer.training.cuda_graph_step import GraphedStep
from trainer.training.flops import FlopsMeter
from trainer.training.fsdp import all_finite, reshard
from trainer.training.loaders import Loader
from trainer.training.state import TrainState, save
from trainer.training.step import TrainPhaseTimer, TrainStep
from trainer.workloads.task import Batch, Task

log = logging.getLogger(__name__)

LAST_EVERY_S = 10.0  # interval of `last.pt`: epochs of small models take a fraction of a second


class RunStoppedError(Exception):
    """The run received a Stop command, or its server is shutting down."""


class TrainerCommands:
    """Command handlers of a run for its `CommandServer`; called by the training thread."""

    def __init__(
        self,
        recorder: Recorder,
        training: TrainState,
        stop: threading.Event,
        at_boundary: Callable[[TrainState], None],
    ) -> None:
        self._recorder = recorder
        self._training = training
        self._stop = stop
        self._at_boundary = at_boundary
        self.handlers: Mapping[CommandName, CommandHandler] = {
            CommandName.STOP: self._stop_run,
            CommandName.SAVE_CHECKPOINT: self._save_checkpoint,
        }

    def check(self) -> None:
        self._at_boundary(self._training)
        if self._stop.is_set():
            raise RunStoppedError("The server was shut down.")

    def _stop_run(self, command: Command) -> None:
        self._recorder.finish(command, f"Stop: after step {self._training.step}")
        raise RunStoppedError(str(command.args.get("reason") or "Stopped from the page."))

    def _save_checkpoint(self, command: Command) -> None:
        path = self._recorder.folder / f"step-{self._training.step}.pt"
        try:
            size = save(path, self._training)
        except OSError as error:
            text = f"Save checkpoint: failed ({error}). Training goes on; free disk space"
            self._recorder.finish(command, text, ok=False)
            return
        text = f"Save checkpoint: {path.name}"
        if size is not None:  # rank 0
            text += f", {format_bytes(size)}"
        self._recorder.finish(command, text, path=path.name, bytes=size)


def log_step(recorder: Recorder, config: RunConfig, step: int, ts: float, row: MetricRow) -> None:
    """Record a row. Raises NonFiniteLossError for a NaN or infinite loss if the policy is stop."""
    loss = row.get("train/loss")
    recorder.log(step, row, ts)
    if loss is None or math.isfinite(loss) or config.nan_policy is not NanPolicy.STOP:
        return
    raise NonFiniteLossError(f"The loss is {loss} at step {step}. {nan_remedy(config)}.")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of an optimizer step over all of its micro-batches."""

    loss: Tensor
    norm: Tensor | None
    samples: int
    waited: float  # seconds without a batch from the loader


@dataclass(kw_only=True)
class TrainLoop:
    """The training loop of a run; call `train`."""

    task: Task
    training: TrainState
    step: TrainStep | GraphedStep
    loader: Loader
    validation_loader: Loader
    reader: Reader
    recorder: Recorder
    commands: CommandServer
    speed: FlopsMeter
    phases: TrainPhaseTimer | None = None  # only with several ranks
    _last_saved: float = field(default_factory=time.monotonic)
    _due: float = 0.0  # above 0 if last.pt is due

    def train(self) -> None:
        """Train to the end. Raises NonFiniteLossError, and RunStoppedError after saving last.pt."""
        self._describe()
        try:
            while not self.training.has_ended:
                self.recorder.epoch = self.training.epoch
                began = time.perf_counter()
                self._train_epoch()
                with _without_gradients(self.training.config):
                    loss, accuracy = self._validate()
                self._close_epoch(loss, accuracy, time.perf_counter() - began)
        except RunStoppedError:
            self.reader.flush()
            if all_finite(self.training.model, self.training.ranks):
                self._save("last.pt")
            raise
        except NonFiniteLossError:
            raise  # rows after this loss are dropped
        except Exception:
            self.reader.flush()  # rows of the steps before the failure
            raise
        finally:
            self.reader.discard()  # its events and buffers belong to the process

    def _train_epoch(self) -> None:
        training = self.training
        # FSDP has replaced the model's parameters by shards.
        parameters = {} if training.config.strategy is Strategy.FSDP else self.task.recorded
        recorded = {key: value.detach().view(()) for key, value in parameters.items()}
        tokens = self.task.tokens_per_sample
        length = self.task.train.length
        batches = self.loader.batches(training.order(length), training.epoch)
        boundary = time.perf_counter()
        while training.offset < length and not training.has_ended:
            learning_rate = training.learning_rate
            done = self._train_step(batches, length - training.offset)
            now = time.perf_counter()
            row: MetricRow = {
                "train/lr": learning_rate,
                "train/epoch": training.epoch,
                "perf/step_time": now - boundary,
                "perf/samples_per_sec": done.samples / (now - boundary),
                "perf/data_wait": done.waited,
                **self.speed.row(done.samples, now - boundary),
            }
            if self.phases is not None:
                row |= self.phases.take()
            if tokens is not None:
                row["perf/tokens_per_sec"] = done.samples * tokens / (now - boundary)
            scalars = {"train/loss": done.loss, **recorded}
            if done.norm is not None:
                scalars["train/grad_norm"] = done.norm
            self.reader.put(training.step, clock.now(), row, scalars)
            self.reader.poll()
            boundary = now + self.commands.serve(self.reader.flush)

    def _train_step(self, batches: Iterator[Batch], left: int) -> StepResult:
        """Take an optimizer step of up to `left` samples, the rest of the epoch over all ranks."""
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
            training.compute.begin_step()
            part, norm = self.step(inputs, targets, samples if count > 1 else 0, number == count)
            training.compute.end_step()
            training.compute.pace()
            self.commands.look()
            loss = part if loss is None else loss + part
        assert loss is not None
        training.count(1, step_samples)
        return StepResult(loss, norm, samples, waited)

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
            outputs, loss = self.step.evaluate(inputs, targets, counted)
            if counted:
                loss_sum += loss * counted
            if self.task.classifies:
                correct += (outputs[:counted].argmax(dim=1) == targets[:counted]).sum()
            self.training.compute.pace()
            if ranks.several:
                self.recorder.signs += 1  # no commands: the ranks are at different batches
            else:
                self.commands.serve(self.reader.flush)
        model.train()
        reshard(model)
        sums = torch.stack([loss_sum, correct]).double()
        # Rank 0's clock decides for all ranks, as they may have to save together.
        due = not ranks.rank and time.monotonic() - self._last_saved >= LAST_EVERY_S
        sums = ranks.sum(torch.cat([sums, sums.new_tensor([seen, due])]))
        total, hits, number, self._due = sums.tolist()
        accuracy = 100 * hits / number if self.task.classifies else None
        return total / number, accuracy

    def _close_epoch(self, loss: float, accuracy: float | None, seconds: float) -> None:
        training = self.training
        row: MetricRow = {"val/loss": loss, "val/accuracy": accuracy}
        if training.scaler.is_enabled():
            row["train/amp_scale"] = training.scaler.get_scale()
        self.recorder.log(training.step, row)
        scored = "" if accuracy is None else f", accuracy {accuracy:.1f}%"
        whole = training.offset >= self.task.train.length
        # max_steps may end a run within an epoch, which a resumed run continues.
        reached = f"Epoch {training.epoch}" if whole else f"Step {training.step}, the last"
        self.recorder.event(
            "epoch",
            f"{reached}: validation loss {loss:.4g}{scored}, {seconds:.2f} s",
            **{key: v for key, v in row.items() if v is not None and math.isfinite(v)},
            seconds=seconds,
        )
        if whole:
            training.next_epoch(loss)
        if loss < training.best_loss:
            training.best_loss = loss
            self._save("best.pt")
        # A model with NaN weights must not overwrite the last good checkpoint.
        if math.isfinite(loss) and (training.has_ended or self._due):
            self._save("last.pt")

    def _save(self, name: str) -> None:
        """Write a checkpoint and record an event; the run continues after a disk error."""
        if name == "last.pt":
            self._last_saved = time.monotonic()
        try:
            size = save(self.recorder.folder / name, self.training)
        except OSError as error:
            log.warning("checkpoint %s: %s", name, error)
            text = f"Checkpoint {name} failed ({error}). Training continues; free disk space"
            self.recorder.event("checkpoint", text, ok=False, path=name)
            return
        if size is not None:  # rank 0
            text = f"Checkpoint {name}, {format_bytes(size)}"
            self.recorder.event("checkpoint", text, ok=True, path=name, bytes=size)

    def _describe(self) -> None:
        training, config = self.training, self.training.config
        reader = self.reader  # not self: the recorder outlives the loop and its model
        self.recorder.also_dropped = lambda: reader.dropped
        self.recorder.describe(
            total_steps=training.total_steps,
            first_step=training.step,
            epochs=config.epochs,
            steps_per_epoch=training.steps_per_epoch,
            batch_size=config.batch_size,
        )
        self.recorder.set_status(RunStatus.RUNNING)


def _without_gradients(config: RunConfig) -> AbstractContextManager[object]:
    """Return the context of a validation: inference mode, except with FSDP.

    FSDP creates tensors in its first forward pass, which may be a validation, and trains with them.
    """
    return torch.no_grad() if config.strategy is Strategy.FSDP else torch.inference_mode()
