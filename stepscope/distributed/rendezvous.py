"""Parse the launcher's environment variables; let the ranks of a job find one run folder.

Launchers: torchrun, Accelerate, DeepSpeed, Lightning's own, srun and Open MPI.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shlex
import socket
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from stepscope.distributed import rank_and_size
from stepscope.run import is_run_id, new_run_folder, pid_namespace
from stepscope.run.folder import folder_name

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
RUN_ID = "STEPSCOPE_RUN_ID"  # Name of the run folder, for ranks on several hosts that share a disk.


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """Rank and size of a job; `local_world_size` is None if unknown, `restarts` is torchrun's."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Environment variables of a launcher, which has set all `marks`.

    Of the other fields the first variable that is set counts.
    """

    marks: tuple[str, ...]
    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    size: tuple[str, ...]
    local_size: tuple[str, ...] = ()


_TORCH = _Launcher(
    marks=("RANK",),
    rank=("RANK", "LOCAL_RANK"),  # Lightning's own launcher sets no RANK on the first node.
    local_rank=("LOCAL_RANK",),
    size=("WORLD_SIZE",),
    local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
)
_LAUNCHERS = (
    _TORCH,
    replace(_TORCH, marks=("LOCAL_RANK", "WORLD_SIZE")),
    # mpirun in a Slurm job lets srun start one daemon on each node. Its ranks inherit the daemon's
    # Slurm variables, so mpirun's own have precedence.
    _Launcher(
        marks=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        marks=("SLURM_STEP_NUM_TASKS",),
        rank=("SLURM_PROCID",),
        local_rank=("SLURM_LOCALID",),
        size=("SLURM_STEP_NUM_TASKS",),
        local_size=("SLURM_STEP_TASKS_PER_NODE",),
    ),
)


def launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return the launcher's variables; without a launcher the process is the only one."""
    for names in _LAUNCHERS:
        if all(mark in environ for mark in names.marks):
            return LauncherEnv(
                rank=_number(environ, names.rank),
                local_rank=_number(environ, names.local_rank),
                world_size=_number(environ, names.size, default=1),
                local_world_size=_number(environ, names.local_size) or None,
                restarts=_number(environ, (RESTARTS,)),
            )
    return LauncherEnv()


def _own_launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return the rank from the environment, or else from torch.distributed."""
    env, group = launch(environ), rank_and_size()
    if env.world_size == 1 and group is not None:
        env = LauncherEnv(rank=group[0], world_size=group[1])
    # Processes of multiprocessing may have ranks in torch alone: the order of their start counts.
    started = getattr(multiprocessing.current_process(), "_identity", ())
    if env.world_size > 1 and "LOCAL_RANK" not in environ and started and not env.local_rank:
        env = replace(env, local_rank=started[-1] - 1)
    return env


def _number(environ: Mapping[str, str], names: Sequence[str], default: int = 0) -> int:
    """Return the first variable that is a number; Slurm writes equal tasks per node as "2(x3)"."""
    for name in names:
        found = re.fullmatch(r"(\d{1,9})(?:\(x\d{1,6}\))?", environ.get(name, ""))
        if found is not None:
            return int(found[1])
    return default


class RankEnvironmentError(Exception):
    """The environment variables of the run are invalid; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """Run folder of a process, its folder rank (`number`), and its global and local rank."""

    folder: Path
    number: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None = None  # Number of processes on this host; None if unknown.
    folder_of: str = "job"  # Whose ranks write here: of the `job`, `host` or `process`.

    @property
    def sharing(self) -> int:
        """Number of processes that write to the folder; their folder ranks begin with 0."""
        if self.folder_of == "process":
            return 1
        local = self.local_world_size if self.folder_of == "host" else None
        return local or self.world_size

    def described(self) -> dict[str, Any]:
        """Return the entries for run.json."""
        keys = ("rank", "local_rank", "world_size", "local_world_size", "folder_of")
        return {key: getattr(self, key) for key in keys}


def find_place(root: Path, name: str, environ: Mapping[str, str]) -> RankContext:
    """Return this process's run folder under `root`; the first of its ranks creates it.

    Ranks of several hosts share the folder that STEPSCOPE_RUN_ID names, unless an earlier run is in
    it. Otherwise each host has a folder with folder ranks from 0. A process that cannot see its
    parent, such as a container's first, has its own folder. Raises OSError, RankEnvironmentError.
    """
    env = _own_launch(environ)
    ranks = env.rank, env.local_rank, env.world_size, env.local_world_size
    run_id = environ.get(RUN_ID)
    if run_id is not None and not is_run_id(run_id):
        raise RankEnvironmentError(
            f"{RUN_ID}: must be letters, digits, '.', '_' or '-', got {run_id!r}."
        )
    if run_id:
        folder = root / (f"{run_id}-restart{env.restarts}" if env.restarts else run_id)
        if not _has_files(folder, env.rank):
            folder.mkdir(parents=True, exist_ok=True)
            return RankContext(folder, env.rank, *ranks)
    shared = _name_after_parent(name, environ) if env.world_size > 1 else None
    if shared is not None and not _has_files(root / shared, env.local_rank):
        (root / shared).mkdir(parents=True, exist_ok=True)
        folder_of = "job" if env.local_world_size == env.world_size else "host"
        return RankContext(root / shared, env.local_rank, *ranks, folder_of)
    # An existing folder is an earlier run's: the same parent, such as a shell, has started both.
    return RankContext(new_run_folder(root, name), 0, *ranks, "process")


def _has_files(folder: Path, number: int) -> bool:
    """Return True if a process of this folder rank has written to a run folder."""
    return any((folder / f"rank{number}.{ending}").exists() for ending in ("sqlite", "json"))


def announce(place: RankContext, runs: Path | None) -> None:
    """Print the run folder and the command that shows it (with `runs`) to stderr, once per host."""
    if place.local_rank == 0:
        see = f"STEPSCOPE_RUNS={shlex.quote(str(runs))} " if runs else ""
        say(f"stepscope: recording into {place.folder}; to see it: {see}stepscope ui")


def say(line: str) -> None:
    """Print a line to stderr; ignores a stderr that is missing or closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{line}\n")


def _name_after_parent(name: str, environ: Mapping[str, str]) -> str | None:
    parent = os.getppid()
    try:
        started = psutil.Process(parent).create_time()
    except psutil.Error:  # it has ended, or lies outside this container (pid 0)
        return None
    # Nodes that share a disk may have equal pids, and one parent may start several jobs at once:
    # their ports differ.
    where = (socket.gethostname(), pid_namespace(), environ.get("MASTER_PORT"))
    tail = f"{parent:x}-{zlib.crc32(repr(where).encode()):08x}"
    # After a failure torchrun restarts all ranks: that is another run.
    restarts = environ.get(RESTARTS, "0")
    return folder_name(started, name, tail if restarts == "0" else f"{tail}-restart{restarts}")
