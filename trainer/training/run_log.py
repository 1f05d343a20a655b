"""What a run records beside its steps: its properties, epochs, and checkpoints."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from stepscope.common.formatting import format_bytes
from stepscope.run import RunStatus
from stepscope.session.sampler import Sampler
from stepscope.session.session import Session
from stepscope.store.cuda_readback import MetricRow
from stepscope.store.recorder import Recorder
from trainer.config import NanPolicy, Strategy
from trainer.training.accelerator import Reader
from trainer.training.checkpoint import read_on_first_rank
from trainer.training.commands import RunStoppedError
from trainer.training.config_validation import TrainDevice
from trainer.training.error_messages import NonFiniteLossError, nan_remedy
from trainer.training.flops import FlopsMeter
from trainer.training.fsdp import all_finite
from trainer.training.state import TrainState, save
from trainer.workloads.task import Task, TensorSplit

LAST_EVERY_S = 10.0  # interval of `last.pt`: epochs of small models take a fraction of a second


def observe_memory(session: Session, sampler: Sampler, training: TrainState) -> None:
    """Measure the memory of model and optimizer, and count steps for failed allocations."""
    parts = sampler.readings.parts  # of the memory breakdown
    parts.add_model(training.model)
    parts.add_optimizer(training.optimizer)
    session.oom.first_step = training.step
    reference = weakref.ref(training)  # the session outlives the model
    # Recorded rows arrive later.
    session.oom.step = lambda: session.recorder.step if (now := reference()) is None else now.step


class RunLog:
    """Records the epochs of a run, and writes its checkpoints."""

    def __init__(
        self, recorder: Recorder, training: TrainState, task: Task, speed: FlopsMeter
    ) -> None:
        self.recorder = recorder
        self._training = training
        self._task = task
        self._speed = speed
        self._last_saved_s = time.monotonic()
        self.save_due = False  # decided by rank 0 for all ranks

    def resume(self, name: str) -> None:
        """Load the checkpoint of a run in the same root folder."""
        recorder, training = self.recorder, self._training
        training.load(read_on_first_rank(recorder.folder.parent / name, training.ranks))
        recorder.step, recorder.epoch = training.step, training.epoch
        recorder.event("resumed", f"Resumed from {name} after step {training.step}", path=name)

    def describe(self, device: TrainDevice) -> None:
        """Record properties of the model in run.json."""
        task = self._task
        self.recorder.describe(
            parameters=sum(weights.numel() for weights in task.model.parameters()),
            compute_capability=device.compute_capability,
            data_in_memory=isinstance(task.train, TensorSplit),
            **self._speed.facts(self._training.config.step_size),
            **task.run_info,
        )

    @contextmanager
    def closing(self, reader: Reader) -> Iterator[None]:
        """Record the length of the run, that it is running, and at its end the rows of all steps.

        Saves last.pt if the run is stopped.
        """
        training, config = self._training, self._training.config
        self.recorder.describe(
            total_steps=training.total_steps,
            first_step=training.step,
            epochs=config.epochs,
            steps_per_epoch=training.steps_per_epoch,
            batch_size=config.batch_size,
        )
        self.recorder.set_status(RunStatus.RUNNING)
        try:
            yield
        except RunStoppedError:
            reader.flush()
            if all_finite(training.model, training.ranks):
                self.save("last.pt")
            raise
        except NonFiniteLossError:
            raise  # rows after this loss are dropped
        except Exception:
            reader.flush()  # rows of the steps before the failure
            raise
        finally:
            reader.discard()  # its events and buffers belong to the process

    def recorded(self) -> dict[str, Tensor]:
        """Return the parameters to record, by metric key; FSDP has replaced them by shards."""
        if self._training.config.strategy is Strategy.FSDP:
            return {}
        return {key: value.detach().view(()) for key, value in self._task.recorded.items()}

    def step_row(self, samples: int, seconds: float) -> MetricRow:
        """Return the metrics of a step of the current epoch."""
        row: MetricRow = {
            "train/epoch": self._training.epoch,
            "perf/step_time": seconds,
            "perf/samples_per_sec": samples / seconds,
            **self._speed.row(samples, seconds),
        }
        if self._task.tokens_per_sample is not None:
            row["perf/tokens_per_sec"] = samples * self._task.tokens_per_sample / seconds
        return row

    def record_step(self, step: int, ts: float, row: MetricRow) -> None:
        """Record a row. Raises NonFiniteLossError for a NaN or infinite loss, if that ends runs."""
        loss = row.get("train/loss")
        self.recorder.log(step, row, ts)
        config = self._training.config
        if loss is None or math.isfinite(loss) or config.nan_policy is not NanPolicy.STOP:
            return
        raise NonFiniteLossError(f"The loss is {loss} at step {step}. {nan_remedy(config)}.")

    def record_epoch(
        self, loss: float, accuracy: float | None, seconds: float, *, whole: bool
    ) -> None:
        """Record the validation after an epoch, or after the last step within one."""
        training = self._training
        row: MetricRow = {"val/loss": loss, "val/accuracy": accuracy}
        if training.scaler.is_enabled():
            row["train/amp_scale"] = training.scaler.get_scale()
        self.recorder.log(training.step, row)
        scored = "" if accuracy is None else f", accuracy {accuracy:.1f}%"
        # max_steps may end a run within an epoch, which a resumed run continues.
        reached = f"Epoch {training.epoch}" if whole else f"Step {training.step}, the last"
        self.recorder.event(
            "epoch",
            f"{reached}: validation loss {loss:.4g}{scored}, {seconds:.2f} s",
            **{key: v for key, v in row.items() if v is not None and math.isfinite(v)},
            seconds=seconds,
        )

    def is_save_due(self) -> bool:
        """Return True if the last `last.pt` is LAST_EVERY_S old."""
        return time.monotonic() - self._last_saved_s >= LAST_EVERY_S

    def save(self, name: str) -> None:
        """Write a checkpoint and record an event; the run continues after a disk error."""
        if name == "last.pt":
            self._last_saved_s = time.monotonic()
        try:
            size = save(self.recorder.folder / name, self._training)
        except OSError as error:
            text = f"Checkpoint {name} failed ({error}). Training continues; free disk space"
            self.recorder.event("checkpoint", text, ok=False, path=name)
            return
        if size is not None:  # rank 0
            text = f"Checkpoint {name}, {format_bytes(size)}"
            self.recorder.event("checkpoint", text, ok=True, path=name, bytes=size)
