"""Failed allocations of a run as the pages show them, and the run that tries again with less."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dashboard.charts.run_view import run_kind
from dashboard.controls.config_widgets import is_possible
from dashboard.run_look import recent
from stepscope.memory.oom.reader import OomAnalysis, judged
from stepscope.memory.oom.record import oom_name
from stepscope.run import RunInfo, RunKind, RunStatus
from stepscope.store import EventRow, StoreError, StoreReader
from stepscope.store.reader import EVERY
from trainer.config import ConfigError, ConfigIssue, RunConfig
from trainer.config_validation import TrainDevice, half_batch

KEPT = 16  # Verdicts kept: a page asks twice a second, and the file changes once.


@dataclass(frozen=True, slots=True)
class OomRetry:
    """The run that would try again; `config` is None where there is none, `refused` says why."""

    config: RunConfig | None
    refused: str | None

    @property
    def label(self) -> str:
        """What stands on the button."""
        if self.config is None:
            return "Retry with half the batch"
        return (
            f"Retry with batch size {self.config.batch_size} × "
            f"{self.config.gradient_accumulation_steps} accumulation steps"
        )

    @property
    def help(self) -> str:
        """What it does."""
        return self.refused or (
            "Halves the batch and doubles accumulation: same samples per step, half the "
            "activations at a time. Starts a new run immediately."
        )

    def as_button(self, busy: str | None) -> dict[str, Any]:
        """Return what the browser draws; `busy` says why nothing can be started now."""
        return {"label": self.label, "help": self.help, "refused": self.refused or busy}


def shortage(run: RunInfo, devices: Sequence[TrainDevice] = ()) -> OomAnalysis | None:
    """Return what is known of a run's failed allocations; None where there were none.

    It is the rank that ended the run which counts. Raises ValueError for a file that is no report
    of ours, and OSError.
    """
    path = run.folder / oom_name(run.cause)
    try:
        told = path.lstat()
    except FileNotFoundError:
        if run.status is not RunStatus.CRASHED:
            return None
        return judged(run)  # the kernel's counter may tell
    key = (str(path), told.st_mtime_ns, run.status, tuple(devices))
    with _LOCK:
        return recent(_JUDGED, key, lambda: _judge(run, devices), KEPT)


def retry(run: RunInfo, devices: Sequence[TrainDevice]) -> OomRetry | None:
    """Return the run that tries again; None for runs that are not ours or had enough memory.

    Nor for one that torchrun has started again by itself.
    """
    settings = run.run_json.get("config")
    if "restarted_as" in run.run_json:
        return None
    if run.status is not RunStatus.FAILED or run_kind(run) is not RunKind.TRAINER:
        return None
    try:
        found = shortage(run)
    except (OSError, ValueError):
        return None
    if found is None or not found.report.ended or not isinstance(settings, dict):
        return None
    try:
        smaller = half_batch(RunConfig.from_dict({**settings, "resume_from": ""}), devices)
    except ConfigError as error:  # of another version, or not ours
        return OomRetry(None, str(error.problem))
    return (
        OomRetry(None, str(smaller))
        if isinstance(smaller, ConfigIssue)
        else OomRetry(smaller, None)
    )


def as_verdict(run: RunInfo, devices: Sequence[TrainDevice]) -> dict[str, Any] | None:
    """Return the line above the tiles for a run that memory has ended; None for all others."""
    if run.status not in (RunStatus.FAILED, RunStatus.CRASHED):
        return None
    try:
        found = shortage(run, devices)
    except (OSError, ValueError):
        return None
    if found is None or not found.report.ended:
        return None
    steps = found.verdict.next
    return {
        "kind": "out-of-memory",
        "text": found.sentence,
        # The header's reason may end with it already.
        "words": steps[0].text if steps and steps[0].text not in (run.reason or "") else "",
        "tab": "memory",
    }


_JUDGED: OrderedDict[Any, OomAnalysis | None] = OrderedDict()
_LOCK = threading.Lock()


def _judge(run: RunInfo, devices: Sequence[TrainDevice]) -> OomAnalysis | None:
    config = run.run_json.get("config")
    allowed: Callable[[str, Any], bool] | None = None
    if devices and isinstance(config, dict):
        allowed = functools.partial(is_possible, config=config, devices=devices)
    return judged(run, run.cause, _events(run), allowed)


def _events(run: RunInfo) -> Sequence[EventRow]:
    try:
        with StoreReader(run.folder, run.cause) as reader:
            return reader.events(limit=EVERY)
    except StoreError:
        return ()
