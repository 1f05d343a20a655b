"""Out-of-memory analyses of runs, and the run that retries with a smaller batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dashboard.charts.run_view import run_kind
from stepscope.common.config_issue import ConfigError, ConfigIssue
from stepscope.memory.oom.classify import OomAnalysis, diagnose_run
from stepscope.run import RunInfo, RunKind, RunStatus
from trainer.config import RunConfig
from trainer.training.config_validation import TrainDevice, halved_batch, is_possible

RETRY_HELP = (
    "Halves the batch and doubles accumulation: same samples per step, half the activations at a "
    "time. Starts a new run immediately."
)


def shortage(run: RunInfo, devices: Sequence[TrainDevice] = ()) -> OomAnalysis | None:
    """Return the analysis of a run's failed allocations; None if none failed.

    A job's is that of the rank that ended it. Raises ValueError for an invalid record, OSError.
    """
    config = run.run_json.get("config")
    allowed: Callable[[str, Any], bool] | None = None
    if devices and config is not None:
        allowed = functools.partial(is_possible, config=config, devices=devices)
    return diagnose_run(run, run.cause, allowed)


def _ended_by(run: RunInfo, devices: Sequence[TrainDevice] = ()) -> OomAnalysis | None:
    """Return the analysis of a run that a lack of memory ended; None for any other run."""
    if run.status not in (RunStatus.FAILED, RunStatus.CRASHED):
        return None
    try:
        found = shortage(run, devices)
    except (OSError, ValueError):
        return None
    return found if found is not None and found.report.ended else None


def retry(run: RunInfo, devices: Sequence[TrainDevice]) -> RunConfig | ConfigIssue | None:
    """Return a smaller batch for a built-in run that memory ended, or why there is none.

    Returns None for any other run.
    """
    settings = run.run_json.get("config")
    if settings is None or run_kind(run) is not RunKind.TRAINER or _ended_by(run) is None:
        return None
    try:
        config = RunConfig.from_dict({**settings, "resume_from": ""})
    except ConfigError as error:  # settings of another version
        return error.problem
    return halved_batch(config, devices)


def retry_button(smaller: RunConfig | ConfigIssue, busy: str | None) -> dict[str, Any]:
    """Return label, help and disabled reason of the button; `busy` is the server's."""
    if isinstance(smaller, ConfigIssue):
        return {"label": "Retry with half the batch", "help": None, "refused": str(smaller)}
    steps = smaller.gradient_accumulation_steps
    label = f"Retry with batch size {smaller.batch_size} × {steps} accumulation steps"
    return {"label": label, "help": RETRY_HELP, "refused": busy}


def out_of_memory_line(run: RunInfo, devices: Sequence[TrainDevice]) -> dict[str, Any] | None:
    """Return the diagnosis line of a run that memory ended; None for any other run."""
    found = _ended_by(run, devices)
    if found is None:
        return None
    steps = found.finding.recommendations
    # The header's reason may already contain the suggestion.
    words = steps[0].text if steps and steps[0].text not in (run.reason or "") else ""
    return {"kind": "out-of-memory", "text": found.sentence, "words": words, "tab": "memory"}
