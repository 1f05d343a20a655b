"""Callback for Lightning's Trainer: a module's logs on the page, and the page's buttons.

    from stepscope.integrations.lightning import StepscopeCallback

    trainer = Trainer(..., callbacks=[StepscopeCallback()])

A callback of `lightning`, or of `pytorch_lightning` if the script has imported only that package:
import it after Lightning. Values logged with `self.log` are recorded at every optimizer step, not
only at every `log_every_n_steps`-th. Only the main process records.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.integrations.callback_run import CallbackRun

if TYPE_CHECKING or ("pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules):
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback

LoggedMetrics = dict[str, Any]


class StepscopeCallback(Callback):
    """Records each `fit` of a Trainer as a run; see the module."""

    def __init__(self, name: str | None = None, *, runs: Path | str | None = None) -> None:
        super().__init__()
        self._run = CallbackRun(name, runs)
        self._seen: LoggedMetrics = {}
        self._of_steps: set[str] = set()
        self._step = 0
        self._lr: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        self._seen, self._of_steps = {}, set()
        if trainer.is_global_zero:
            self._run.begin(
                {key: str(value) for key, value in pl_module.hparams.items()},
                self._step,
                total_steps=_finite(trainer.estimated_stepping_batches),
                epochs=_finite(trainer.max_epochs),
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the epoch, and record the values at the end of the previous epoch."""
        self._run.log(self._fresh(trainer))
        self._run.set_epoch(trainer.current_epoch + 1)
        if trainer.current_epoch:  # the end of an epoch, with checkpoints, is no step time
            self._run.restart_clock()

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Read the learning rate before a scheduler changes it."""
        if trainer.optimizers:
            self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Record the optimizer step, if the batch completes a step."""
        if not trainer.is_global_zero or trainer.global_step == self._step:
            self._run.work()
            return  # gradients are being accumulated
        self._step = trainer.global_step
        values = self._fresh(trainer, of_step=True)
        if isinstance(outputs, Mapping) and trainer.accumulate_grad_batches == 1:
            values.setdefault("train/loss", outputs.get("loss"))
        values["train/lr"] = self._lr
        if self._run.step(values, may_catch=trainer.world_size == 1):
            trainer.should_stop = True

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._run.work()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the validation's values, and exclude its time from the step time."""
        if not trainer.sanity_checking:
            self._run.log(self._fresh(trainer))
            self._run.restart_clock()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.log(self._fresh(trainer))
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._run.fail(exception)

    def _fresh(self, trainer: Any, *, of_step: bool = False) -> LoggedMetrics:
        """Return the values logged since the last call, by metric key; tensors unchanged.

        `logged_metrics` keeps the values of earlier phases: new values are new objects. It reads
        metrics of the progress bar from the GPU, as Lightning does after every batch; other metrics
        cause no synchronization.
        """
        logged = dict(trainer.logged_metrics)
        fresh = {name: value for name, value in logged.items() if value is not self._seen.get(name)}
        self._seen = logged
        if of_step:
            self._of_steps.update(fresh)
        else:  # Lightning adds a step's values again after its callbacks
            fresh = {name: fresh[name] for name in fresh if name not in self._of_steps}
        return {metric_key(name): value for name, value in fresh.items()}


def metric_key(name: str) -> str:
    """Return the metric key of a name in `self.log`; train_loss and val_loss are standard keys.

    Other validation values get `eval/…`: val/accuracy is in percent, a module's may not be.
    """
    if name in ("loss", "train_loss", "loss_step", "train_loss_step", "train/loss_step"):
        return "train/loss"
    group, _, rest = name.partition("/" if "/" in name else "_")
    if group in ("val", "valid", "validation") and rest:
        return "val/loss" if rest == "loss" else f"eval/{rest}"
    if "/" in name:
        return name
    return f"train/{rest}" if group == "train" and rest else f"train/{name}"


def _finite(count: float | None) -> int | None:
    """Return a number of steps or epochs; None if unlimited (-1, infinite)."""
    return int(count) if count is not None and 0 < count < float("inf") else None
