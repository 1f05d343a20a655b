"""How the processes of one distributed run find one folder without talking to each other.

A launcher starts the ranks and tells each its number in the environment. All ranks of a machine
have the same parent, and so agree on a folder named after it. Ranks of several machines meet by
what the launcher tells them alike, where they share a disk.
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
from typing import Any

import psutil

from stepscope.distributed.meeting import is_shared, meet
from stepscope.distributed.rendezvous import RESTARTS, TORCHRUN, Launch, own_launch
from stepscope.run import folder_name, is_run_id, new_run_folder, pid_namespace
from stepscope.run.process import start_above

RUN_ID = "STEPSCOPE_RUN_ID"
"""Names the run folder; for ranks that share a disk and do not find each other by themselves."""


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
    local_world_size: int | None = None
    """Processes of this host; None where the launcher does not say."""
    folder_of: str = "job"
    """Whose ranks write here: those of the whole `job`, of this `host`, or this `process` alone."""

    @property
    def sharing(self) -> int:
        """How many processes write into the folder, with the numbers from 0."""
        if self.folder_of == "process":
            return 1
        own = self.local_world_size if self.folder_of == "host" else None
        return own or self.world_size

    def described(self) -> dict[str, Any]:
        """Return what run.json says of it."""
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "folder_of": self.folder_of,
        }


def find_place(root: Path, name: str, environ: Mapping[str, str]) -> Place:
    """Make this process's run folder under `root`, or find the one that other ranks have made.

    Ranks of several machines share a folder where STEPSCOPE_RUN_ID names it, or where they share a
    disk and the launcher names the job. Otherwise each machine has a folder of its own, in which
    its processes count from 0. So has a process that cannot see its parent, such as the first one
    in a container. Raises OSError and RankError.
    """
    found = own_launch(environ)
    wanted = environ.get(RUN_ID)
    if wanted is not None and not is_run_id(wanted):
        raise RankError(f"{RUN_ID}: must be letters, digits, '.', '_' or '-', got {wanted!r}.")
    if wanted:
        folder = root / (f"{wanted}-restart{found.restarts}" if found.restarts else wanted)
        if not _taken(folder, found.rank):
            folder.mkdir(parents=True, exist_ok=True)
            return _place(folder, found.rank, found)
    job = (wanted,) if wanted else found.job
    if job is not None and (wanted or (found.several_hosts and is_shared(root, found.address))):
        kind = (*job, str(found.world_size), str(found.restarts))
        folder = meet(root, name, kind, _files(found.rank), _gathered(environ))
        return _place(folder, found.rank, found)
    shared = _name_after_parent(name, environ) if found.world_size > 1 else None
    if shared is None:
        return _place(new_run_folder(root, name), 0, found, folder_of="process")
    folder, number = root / shared, found.local_rank
    folder.mkdir(parents=True, exist_ok=True)
    if _taken(folder, number):
        # The name of an earlier run: its parent, such as a shell, has started this one as well.
        return _place(new_run_folder(root, name), 0, found, folder_of="process")
    whole = found.local_world_size == found.world_size
    return _place(folder, number, found, folder_of="job" if whole else "host")


def _place(folder: Path, number: int, found: Launch, *, folder_of: str = "job") -> Place:
    return Place(
        folder,
        number,
        found.rank,
        found.local_rank,
        found.world_size,
        found.local_world_size,
        folder_of,
    )


def _files(number: int) -> tuple[str, ...]:
    """Return what a process of this number writes first."""
    return f"rank{number}.sqlite", f"rank{number}.json"


def _taken(folder: Path, number: int) -> bool:
    return any((folder / file).exists() for file in _files(number))


def _gathered(environ: Mapping[str, str]) -> float | None:
    """Return a time before which no process of the job began; None where nothing tells one.

    torchrun's agents of all hosts wait for each other before the first of them starts its ranks.
    Other launchers may start those of one host before they have begun on another, and so may
    torchrun where it is told that all hosts are alike.
    """
    if TORCHRUN not in environ or environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return None
    return start_above(TORCHRUN)


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
    restarts = environ.get(RESTARTS, "0")
    return folder_name(started, name, tail if restarts == "0" else f"{tail}-restart{restarts}")
