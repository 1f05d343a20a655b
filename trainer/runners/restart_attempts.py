"""The attempts of a job of several ranks: torchrun starts all ranks again after one has failed.

Each attempt records into a folder of its own, so that nothing recorded is lost: ID, ID-restart1,
ID-restart2, … The first process of a new attempt links the two folders (`restart_of` and
`restarted_as` in run.json) and keeps how the former one ended. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.run import RUN_JSON, RunError, RunStatus, read_run
from stepscope.run.rank_info import UNREADABLE, read_run_json
from stepscope.store import StoreError, StoreReader
from stepscope.store.reader import EVERY
from trainer.config import RunConfig
from trainer.runners.job_outcome import JobOutcome, end_of, note_job_end
from trainer.runners.process import write_pending

log = logging.getLogger(__name__)

SAVED = ("last.pt", "step-*.pt")
"""Checkpoints that a restart goes on from; best.pt may be far behind."""
_RANK_FILES = ("rank*.sqlite", "rank*.ring", "rank*.json")


@dataclass(frozen=True, slots=True)
class RestartAttempt:
    """One start of all ranks; `former` is the folder of the attempt before, None for the first."""

    number: int
    folder: Path
    config: RunConfig
    former: Path | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """Why an attempt began: the sentence for its page, and what run.json keeps of it."""

    text: str
    run_json: dict[str, Any]


def attempt_folder(first: Path, number: int) -> Path:
    """Return the folder of an attempt of the job whose first one records into `first`."""
    return first if number == 0 else first.with_name(f"{first.name}-restart{number}")


def newest_number(first: Path, max_restarts: int) -> int:
    """Return the number of the newest attempt that has begun."""
    numbers = range(max_restarts, 0, -1)
    begun = (n for n in numbers if (attempt_folder(first, n) / RUN_JSON).exists())
    return next(begun, 0)


def free_number(first: Path, least: int) -> int:
    """Return the first attempt from `least` on into whose folder no rank has recorded yet."""
    number = least
    while any(any(attempt_folder(first, number).glob(name)) for name in _RANK_FILES):
        number += 1
    return number


def attempt(first: Path, number: int, config: RunConfig) -> RestartAttempt:
    """Return an attempt, which resumes from the newest checkpoint of those before it.

    Without one it begins where the first attempt did.
    """
    before = [attempt_folder(first, earlier) for earlier in range(number)]
    former = next((folder for folder in reversed(before) if folder.is_dir()), None)
    saved = next(filter(None, map(newest_checkpoint, reversed(before))), None)
    if saved is not None:
        config = replace(config, resume_from=f"{saved.parent.name}/{saved.name}")
    return RestartAttempt(number, attempt_folder(first, number), config, former)


def complete(first: Path, number: int) -> str | None:
    """Say that nothing is left for an attempt, where the one before has finished; else None."""
    former = attempt_folder(first, number - 1)
    with contextlib.suppress(RunError):
        if number > 0 and (run := read_run(former)).status is RunStatus.FINISHED:
            step = run.run_json.get("step", 0)
            return f"The job is complete: {former.name} finished after step {step:,}."
    return None


def begin(this: RestartAttempt, log_file: Path, max_restarts: int) -> Restart | None:
    """Make an attempt's folder and link it with the one before; for the first rank of a job.

    `log_file` is what torchrun has printed. Returns None for the first attempt. Raises OSError.
    """
    this.folder.mkdir(parents=True, exist_ok=True)
    if this.former is None:
        if not (this.folder / RUN_JSON).exists():
            write_pending(this.folder, this.config, "Starting the ranks of the job.")
        return None
    end = end_of(this.former, log_file)
    restart = _restart(this, end, max_restarts)
    reason = f"{restart.text} The ranks are starting."
    write_pending(this.folder, this.config, reason, **restart.run_json)
    note_job_end(this.former, end, restarted_as=this.folder.name)
    return restart


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest of a run's checkpoints, but for the best one; None without any."""
    found = [path for name in SAVED for path in folder.glob(name)]
    # A file's time may fall, where somebody sets the clock.
    order = {path: (checkpoint_step(path) or 0, path.stat().st_mtime) for path in found}
    return max(order, key=order.__getitem__, default=None)


def checkpoint_step(path: Path) -> int | None:
    """Return the step after which a run has written its checkpoint; None if not known."""
    with contextlib.suppress(StoreError), StoreReader(path.parent) as reader:
        for event in reversed(reader.events(limit=EVERY)):
            if event.data.get("ok") and event.data.get("path") == path.name:
                return event.step
    return None


def _restart(this: RestartAttempt, end: JobOutcome, max_restarts: int) -> Restart:
    assert this.former is not None
    resume = this.config.resume_from
    step = checkpoint_step(this.folder.parent / resume) if resume else None
    where = "no checkpoint yet, starting from scratch"
    if resume:
        where = f"resumes after step {step:,}" if step is not None else f"resumes from {resume}"
    number = f"Restart {this.number}" + (f" of {max_restarts}" if max_restarts else "")
    text = f"{number}: {end.short}; {where}."
    kept = {
        "number": this.number,
        "of": max_restarts,
        "cause": end.short,
        "rank": end.rank,
        "exit_code": end.exit_code,
        "step": step,
    }
    return Restart(text, {"restart_of": this.former.name, "restart": kept})


def config_from_run_json(first: Path) -> RunConfig:
    """Return the configuration that the runner has left in run.json. Raises RunError."""
    try:
        return RunConfig.from_dict(read_run_json(first, 0)["config"])
    except UNREADABLE as error:
        raise RunError(f"{first.name}: its run.json holds no settings ({error}).") from error


def ended_badly(folder: Path) -> bool:
    """Say whether this attempt has ended so that torchrun may start another one."""
    with contextlib.suppress(RunError):
        return read_run(folder).status in (RunStatus.FAILED, RunStatus.CRASHED)
    return False
