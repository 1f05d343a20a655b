"""The run folder: its name, where it lies, and its `run.json`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_write

RUN_JSON = "run.json"
NAME_TRIES = 100
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunError(Exception):
    """A run folder that cannot be used; the message is one sentence with a remedy."""


def new_run_folder(root: Path, name: str) -> Path:
    """Create and return an empty run folder under `root`, its name from the time and `name`.

    No two callers get the same one, however many start in a second. Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    for _ in range(NAME_TRIES):
        folder = root / folder_name(time.time(), name, secrets.token_hex(4))
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(errno.EEXIST, f"{NAME_TRIES} names were taken", str(root))


def folder_name(started: float, name: str, tail: str) -> str:
    """Return the name of a run's folder: its start in UTC, its name in plain letters, `tail`."""
    stamp = time.strftime("%Y%m%d-%H%M%SZ", time.gmtime(started))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
    return f"{stamp}-{slug}-{tail}"


def is_run_id(text: str) -> bool:
    """Say whether this can be the name of a run's folder."""
    return _RUN_ID.fullmatch(text) is not None


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of a run named by a user or a URL.

    Raises RunError where the id is not a plain name or there is no such run under `root`.
    """
    folder = root / run_id
    if not _RUN_ID.fullmatch(run_id) or not is_in(folder, root):
        raise RunError(f"run: must be the name of a run folder, got {run_id[:120]!r}.")
    if not os.path.isfile(folder / RUN_JSON):  # False where it cannot be read
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            raise RunError(f"run: {folder} cannot be read. Change its permissions.")
        raise RunError(f"run: no run {run_id!r} in {root}. Pick one from the list.")
    return folder


def is_in(folder: Path, root: Path) -> bool:
    """Return True if a folder lies directly in `root`, links followed."""
    return os.path.dirname(os.path.realpath(folder)) == os.path.realpath(root)


def run_folders(root: Path, name: str = RUN_JSON) -> Iterator[Path]:
    """Yield the folders under `root` that have a file `name`, newest name first.

    Older names have local time in them. None where the folders cannot be listed; a folder that
    cannot be read is left out.
    """
    try:
        names = sorted(filter(is_run_id, os.listdir(root)), reverse=True)
    except OSError:
        return
    for found in names:
        if os.path.isfile(root / found / name):  # False where it cannot be read
            yield root / found


def runs_root(runs: Path | None = None) -> Path:
    """Return the absolute folder of all runs: `runs`, else STEPSCOPE_RUNS, else ./runs.

    An empty STEPSCOPE_RUNS counts as not set.
    """
    return (runs or Path(os.environ.get("STEPSCOPE_RUNS") or "runs")).absolute()


def write_run_json(
    folder: Path, run_json: Mapping[str, Any], name: str = RUN_JSON, *, durable: bool = True
) -> None:
    """Replace the run.json of a run, or of one of its ranks. Raises OSError."""
    atomic_write(folder / name, json.dumps(run_json, indent=1), durable=durable)


def rank_json(rank: int) -> str:
    """Return the name of the file in which a rank keeps its own run.json."""
    return RUN_JSON if rank == 0 else f"rank{rank}.json"


def rank_file(name: str, rank: int) -> str:
    """Return the name of a rank's own file: output.log of rank 1 is output.rank1.log."""
    stem, _, ending = name.rpartition(".")
    return name if rank == 0 else f"{stem}.rank{rank}.{ending}"
