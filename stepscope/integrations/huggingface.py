"""Callback for the Hugging Face Trainer: its logs on the page, and the page's buttons.

    from stepscope.integrations.huggingface import StepscopeCallback

    trainer = Trainer(..., callbacks=[StepscopeCallback()])

The Trainer's logs are recorded unchanged, every `logging_steps` steps (default 500: set 1 or 10).
Step time, memory and GPUs do not depend on it. Only the main process records. `stepscope watch`
records more (loss of every step, data wait, samples per second); both may be combined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stepscope.integrations.callback_run import CallbackRun

_NAMES = {
    "loss": "train/loss",
    "learning_rate": "train/lr",
    "grad_norm": "train/grad_norm",
    "eval_loss": "val/loss",
}
_EPOCHS = "train/epochs_done"
"""The Trainer's fractional `epoch`; train/epoch is the number of the current epoch."""


class StepscopeCallback(TrainerCallback):
    """Records each training of a Trainer as a run; see the module."""

    def __init__(self, name: str | None = None, *, runs: Path | str | None = None) -> None:
        self._run = CallbackRun(name, runs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._run.begin(
                args.to_sanitized_dict(),
                state.global_step,
                total_steps=state.max_steps,
                epochs=math.ceil(state.num_train_epochs),
            )

    def on_epoch_begin(self, args: Any, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        self._run.set_epoch(int(state.epoch or 0) + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the step; a stop lets the Trainer log and save as after the last step."""
        if self._run.step({_EPOCHS: state.epoch}, may_catch=args.world_size == 1):
            control.should_training_stop = True

    def on_log(self, *args: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._run.log(metrics(logs or {}))

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Exclude an evaluation or a checkpoint from the step time."""
        self._run.restart_clock()

    on_save = on_evaluate

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._run.work()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """End the run; after an exception the exit of the script ends it."""
        self._run.end()


def metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a log by metric key: `eval_x` as `eval/x`, totals as `summary/x`."""
    return {
        _key(name): value
        for name, value in logs.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch"
    }


def _key(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    group, _, rest = name.partition("_")
    if group == "eval" and rest:
        return f"eval/{rest}"
    if name == "total_flos" or (group == "train" and rest):
        return f"summary/{name}"
    return name if "/" in name else f"train/{name}"
