"""How the processes of one distributed run find one folder without talking to each other.

torchrun and its like start the ranks and tell each its number in the environment. All ranks of a
machine have the same parent, and so agree on a folder named after it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepscope.run import folder_name, is_run_id, new_run_folder, pid_namespace

RUN_ID = "STEPSCOPE_RUN_ID"
"""Names the run folder; for ranks on several machines, or started by other means than torchrun."""


class RankError(Exception):
    """The environment variables of the run are wrong; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a run and the number of this process in it; `rank` is the one of torch."""

    folder: Path
    number: int
    rank: int
    local_rank: int
    world_size: int


def find_place(root: Path, name: str, environ: Mapping[str, str]) -> Place:
    """Make this process's run folder under `root`, or find the one that other ranks have made.

    Ranks of several machines share a folder only if STEPSCOPE_RUN_ID names it. Otherwise each
    machine has a folder of its own, in which its processes count from 0. So has a process that
    cannot see its parent, such as the first one in a container. Raises OSError and RankError.
    """
    rank, local_rank, world_size = (
        _number(environ, key, default)
        for key, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    wanted = environ.get(RUN_ID)
    if wanted is not None and not is_run_id(wanted):
        raise RankError(f"{RUN_ID}: must be letters, digits, '.', '_' or '-', got {wanted!r}.")
    number = rank if wanted else local_rank
    shared = _name_after_parent(name, environ) if wanted is None and world_size > 1 else wanted
    if shared is None:
        return Place(new_run_folder(root, name), 0, rank, local_rank, world_size)
    folder = root / shared
    folder.mkdir(parents=True, exist_ok=True)
    if any((folder / file).exists() for file in (f"rank{number}.sqlite", f"rank{number}.json")):
        # The name of an earlier run: its parent, such as a shell, has started this one as well.
        folder, number = new_run_folder(root, name), 0
    return Place(folder, number, rank, local_rank, world_size)


def announce(place: Place, runs: Path | None) -> None:
    """Say on stderr, once a machine, where the run is recorded and which command shows it.

    `runs` is the folder of all runs if that command needs it.
    """
    if place.local_rank == 0:
        see = f"STEPSCOPE_RUNS={shlex.quote(str(runs))} " if runs else ""
        say(f"stepscope: recording into {place.folder}; to see it: {see}stepscope ui")


def say(line: str) -> None:
    """Write a line to stderr, if there is one and somebody reads it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{line}\n")


def _name_after_parent(name: str, environ: Mapping[str, str]) -> str | None:
    parent = os.getppid()
    try:
        started = psutil.Process(parent).create_time()
    except psutil.Error:  # it has ended, or lies outside this container (number 0)
        return None
    # Nodes that share a disk may number their processes alike, and one parent may start several
    # jobs at once: a job has its port.
    where = (socket.gethostname(), pid_namespace(), environ.get("MASTER_PORT"))
    tail = f"{parent:x}-{zlib.crc32(repr(where).encode()):08x}"
    # torchrun starts all ranks anew after a failure: that is another run.
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return folder_name(started, name, tail if restarts == "0" else f"{tail}-restart{restarts}")


def _number(environ: Mapping[str, str], key: str, default: int) -> int:
    text = environ.get(key, "")
    return int(text) if text.isdecimal() else default
