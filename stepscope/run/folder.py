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

RUN_JSON = "run.json"
ARRIVALS = "arrivals.json"
"""When a rank entered its newest collectives (`sampling/arrivals.py`)."""
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
    """Return the name of a run's folder: its start, its name in plain letters, and `tail`."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
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
    if not _RUN_ID.fullmatch(run_id) or folder.resolve().parent != root.resolve():
        raise RunError(f"run: must be the name of a run folder, got {run_id[:120]!r}.")
    if not (folder / RUN_JSON).is_file():
        raise RunError(f"run: no run {run_id!r} in {root}. Pick one from the list.")
    return folder


def run_folders(root: Path) -> Iterator[Path]:
    """Yield the run folders under `root`, newest name first."""
    if root.is_dir():
        for path in sorted(root.iterdir(), key=lambda path: path.name, reverse=True):
            if _RUN_ID.fullmatch(path.name) and (path / RUN_JSON).is_file():
                yield path


def runs_root(runs: Path | None = None) -> Path:
    """Return the absolute folder of all runs: `runs`, else STEPSCOPE_RUNS, else ./runs.

    An empty STEPSCOPE_RUNS counts as not set.
    """
    return (runs or Path(os.environ.get("STEPSCOPE_RUNS") or "runs")).absolute()


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give a file beside `path` to write to, which takes its place at the end.

    A reader sees the former file or the whole new one. An error leaves the former one, and nothing
    beside it. A `durable` file is on the disk before it takes the place, so that a power failure
    cannot leave an empty one: that waits for the disk, some 5 ms on an SSD. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        if durable:
            _wait_for_disk(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _wait_for_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_run_json(
    folder: Path, run_json: Mapping[str, Any], name: str = RUN_JSON, *, durable: bool = True
) -> None:
    """Replace the run.json of a run, or of one of its ranks. Raises OSError."""
    with replacing(folder / name, durable=durable) as part:
        part.write_text(json.dumps(run_json, indent=1))


def rank_json(rank: int) -> str:
    """Return the name of the file in which a rank keeps its own run.json."""
    return RUN_JSON if rank == 0 else f"rank{rank}.json"


def rank_file(name: str, rank: int) -> str:
    """Return the name of a rank's own file: output.log of rank 1 is output.rank1.log."""
    stem, _, ending = name.rpartition(".")
    return name if rank == 0 else f"{stem}.rank{rank}.{ending}"
