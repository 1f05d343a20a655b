"""The folder of a sweep: `plan.json`, `sweep.json`, and `trials.jsonl`, a line per trial."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import (
    atomic_write,
    is_own_folder,
    read_json,
    read_regular_file,
    try_lock,
)
from stepscope.run import (
    RunError,
    is_run_id,
    new_run_folder,
    process_of,
    run_folders,
)
from stepscope.run.folder import is_here, is_in
from stepscope.settings.setting import AppliedSetting

SCHEMA = 1
LAB = "lab"
PLAN_JSON = "plan.json"
SWEEP_JSON = "sweep.json"
TRIALS_FILE = "trials.jsonl"
LOCK = "lock"
_MAX_BYTES = 16 * 2**20
INTERRUPTED = "Stopped; resume continues from here."
GONE = "The process is gone (killed, or the machine went down). Resume continues from here."
STALE_S = 3600.0
"""Time without update after which a sweep of another host or container counts as ended."""

MAX_TRIALS_BYTES = 256 * 2**20  # A trial has about 2 kB.
METRICS = (
    *("samples_per_sec", "step_time", "data_wait", "h2d", "gpu_time"),
    *("peak_allocated", "peak_reserved", "peak_process", "energy_per_sample", "loss", "mfu"),
)
"""Metrics of a trial that sweep.json has for each variant (docs/lab.md)."""


class SweepError(Exception):
    """An unusable sweep folder; the message has a remedy."""


def new_sweep_folder(root: Path, workload: str) -> Path:
    """Create and return an empty folder for a sweep. Raises OSError."""
    return new_run_folder(root / LAB, workload)


def sweep_folder(root: Path, sweep_id: str) -> Path:
    """Return the folder of a sweep. Raises SweepError for an unsafe or unknown id."""
    folder = root / LAB / sweep_id
    if not is_run_id(sweep_id) or not is_in(folder, root / LAB):
        raise SweepError(f"sweep: must be the name of a sweep's folder, got {sweep_id[:120]!r}.")
    if not os.path.isfile(folder / PLAN_JSON):
        raise SweepError(f"sweep: no sweep {sweep_id!r} in {root / LAB}. Pick one from the list.")
    return folder


def sweep_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of all sweeps, newest name first; none if their folder is unreadable."""
    with contextlib.suppress(RunError):
        yield from run_folders(root / LAB, PLAN_JSON)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep. Raises SweepError if it is taken or another user's, and OSError."""
    if not is_own_folder(folder):
        raise SweepError(f"{folder.name}: belongs to another user. Copy the folder.")
    # In an untrusted folder this may be a link: do not follow or truncate it.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(folder / LOCK, flags, 0o666)) as file:
        if try_lock(file.fileno()) is False:  # None: the file system has no locks
            raise SweepError(
                f"{folder.name}: another process is running this sweep. Stop it first."
            )
        yield


def read_plan(folder: Path) -> dict[str, Any]:
    return _read(folder / PLAN_JSON)


def read_sweep(folder: Path) -> dict[str, Any]:
    """Return sweep.json, with status "stopped" if its process has ended. Raises SweepError."""
    sweep = _read(folder / SWEEP_JSON)
    if sweep.get("status") == "running" and not _alive(sweep):
        sweep |= {"status": "stopped", "reason": GONE}
    return sweep


def _alive(sweep: dict[str, Any]) -> bool:
    if is_here(sweep):
        return process_of(sweep) is not None
    updated = sweep.get("updated")
    return isinstance(updated, int | float) and abs(time.time() - updated) < STALE_S


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file atomically. Raises OSError, and ValueError for NaN and infinity."""
    atomic_write(path, json.dumps(content, indent=1, allow_nan=False), durable=False)


def _read(path: Path) -> dict[str, Any]:
    where = f"{path.parent.name}/{path.name}"
    try:
        content = read_json(path, _MAX_BYTES)
    except OSError as error:
        raise SweepError(f"{where}: cannot be read ({error.strerror}). Start a sweep.") from error
    except ValueError as error:
        raise SweepError(f"{where}: is not JSON ({error}). Delete the folder.") from error
    if not isinstance(content, dict):
        raise SweepError(f"{where}: must be a JSON object. Delete the folder.")
    return content


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one child process, or the `reason` of its failure.

    `contest` is the key of its comparison, `seconds` the wall time of the process. `settings` are
    those of a script's trial.
    """

    contest: str
    round: int
    name: str
    reason: str | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    metrics: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    settings: list[AppliedSetting] = []

    @property
    def is_refused(self) -> bool:
        """True if a setting was not in effect, which another attempt cannot change."""
        return not self.ok and any(one.state != "in effect" for one in self.settings)

    @property
    def ok(self) -> bool:
        return self.reason is None


def read_trials(folder: Path) -> list[Trial]:
    """Return the valid trials of a sweep, without an incomplete last line. Raises SweepError."""
    path = folder / TRIALS_FILE
    trials: list[Trial] = []
    try:
        lines = read_regular_file(path, MAX_TRIALS_BYTES).split(b"\n")
    except FileNotFoundError:
        return trials
    except (OSError, ValueError) as error:
        raise SweepError(f"{folder.name}/{TRIALS_FILE}: cannot be read ({error}).") from error
    lines.pop()  # incomplete, or empty
    for number, text in enumerate(lines, start=1):
        try:
            trials.append(msgspec.json.decode(text, type=Trial))
        except (ValueError, RecursionError) as error:
            raise SweepError(
                f"{folder.name}/{TRIALS_FILE}: line {number} is no trial ({error}). Delete it."
            ) from error
    return trials


def write_trials(folder: Path, trials: Sequence[Trial]) -> None:
    """Replace the trials of a sweep, on disk when it returns. Raises OSError."""
    lines = [msgspec.json.encode(trial).decode() + "\n" for trial in trials]
    atomic_write(folder / TRIALS_FILE, "".join(lines), durable=True)
