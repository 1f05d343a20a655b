"""Attempts of a distributed run: torchrun restarts all ranks after a failure.

Each attempt records into a new folder: ID, ID-restart1, ID-restart2, … Its rank 0 links the folders
(`restart_of` and `restarted_as` in run.json) and records the outcome of the former attempt. Does
not import torch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.run import RUN_JSON, RunError, RunStatus, read_run
from stepscope.run.rank_info import UNREADABLE, read_run_json
from stepscope.store import StoreError, StoreReader
from stepscope.store.reader import EVERY
from trainer.config import RunConfig
from trainer.runners.child_process import write_pending
from trainer.runners.job_outcome import end_of, note_job_end

SAVED = ("last.pt", "step-*.pt")  # a restart does not resume from best.pt, which may be old
_RANK_FILES = ("rank*.sqlite", "rank*.ring", "rank*.json")


@dataclass(frozen=True, slots=True)
class RestartAttempt:
    """A start of all ranks; `former` is the folder of the attempt before, None for the first."""

    number: int
    folder: Path
    config: RunConfig
    former: Path | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """The reason of a restart as a sentence, and its values for run.json."""

    text: str
    run_json: dict[str, Any]


def attempt_folder(first: Path, number: int) -> Path:
    """Return the folder of attempt `number`, where `first` is that of attempt 0."""
    return first if number == 0 else first.with_name(f"{first.name}-restart{number}")


def newest_number(first: Path, max_restarts: int) -> int:
    """Return the number of the newest attempt that has begun."""
    numbers = range(max_restarts, 0, -1)
    return next((n for n in numbers if (attempt_folder(first, n) / RUN_JSON).exists()), 0)


def free_number(first: Path, least: int) -> int:
    """Return the first attempt number from `least` whose folder has no rank files."""
    number = least
    while any(any(attempt_folder(first, number).glob(name)) for name in _RANK_FILES):
        number += 1
    return number


def attempt(first: Path, number: int, config: RunConfig) -> RestartAttempt:
    """Return an attempt that resumes from the newest checkpoint of the former attempts, if any."""
    before = [attempt_folder(first, earlier) for earlier in range(number)]
    former = next((folder for folder in reversed(before) if folder.is_dir()), None)
    saved = next(filter(None, map(newest_checkpoint, reversed(before))), None)
    if saved is not None:
        config = replace(config, resume_from=f"{saved.parent.name}/{saved.name}")
    return RestartAttempt(number, attempt_folder(first, number), config, former)


def complete(first: Path, number: int) -> str | None:
    """Return a message if the former attempt has finished; None otherwise."""
    former = attempt_folder(first, number - 1)
    if number > 0 and _status(former) is RunStatus.FINISHED:
        return f"The job is complete: {former.name} has finished."
    return None


def begin(this: RestartAttempt, log_file: Path, max_restarts: int) -> Restart | None:
    """Create an attempt's folder, for rank 0; link it with the former, if any. Raises OSError."""
    this.folder.mkdir(parents=True, exist_ok=True)
    if this.former is None:
        if not (this.folder / RUN_JSON).exists():
            write_pending(this.folder, this.config, "Starting the ranks of the job.")
        return None
    end = end_of(this.former, log_file)
    resume = this.config.resume_from
    step = checkpoint_step(this.folder.parent / resume) if resume else None
    where = "no checkpoint yet, starting from scratch"
    if resume:
        where = f"resumes after step {step:,}" if step is not None else f"resumes from {resume}"
    number = f"Restart {this.number}" + (f" of {max_restarts}" if max_restarts else "")
    text = f"{number}: {end.short}; {where}."
    values = {
        "number": this.number,
        "of": max_restarts,
        "cause": end.short,
        "rank": end.rank,
        "exit_code": end.exit_code,
        "step": step,
    }
    restart = Restart(text, {"restart_of": this.former.name, "restart": values})
    write_pending(this.folder, this.config, f"{text} The ranks are starting.", **restart.run_json)
    note_job_end(this.former, end, restarted_as=this.folder.name)
    return restart


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run except best.pt; None without any."""
    found = [path for name in SAVED for path in folder.glob(name)]
    # By step first: file times may jump with the clock.
    order = {path: (checkpoint_step(path) or 0, path.stat().st_mtime) for path in found}
    return max(order, key=order.__getitem__, default=None)


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint from the events of its run; None if unknown."""
    with contextlib.suppress(StoreError), StoreReader(path.parent) as reader:
        for event in reversed(reader.events(limit=EVERY)):
            if event.data.get("ok") and event.data.get("path") == path.name:
                return event.step
    return None


def config_from_run_json(first: Path) -> RunConfig:
    """Return the configuration in a folder's run.json. Raises RunError."""
    try:
        return RunConfig.from_dict(read_run_json(first, 0)["config"])
    except UNREADABLE as error:
        raise RunError(f"{first.name}: its run.json holds no settings ({error}).") from error


def ended_badly(folder: Path) -> bool:
    return _status(folder) in (RunStatus.FAILED, RunStatus.CRASHED)


def _status(folder: Path) -> RunStatus | None:
    with contextlib.suppress(RunError):
        return read_run(folder).status
    return None
