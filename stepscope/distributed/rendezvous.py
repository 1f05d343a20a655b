"""Parse the launcher's environment variables; let the ranks of a job find one run folder.

Launchers: torchrun and all that use it, Accelerate, DeepSpeed, Lightning's own launcher (`RANK` or
`LOCAL_RANK`), srun (`SLURM_*`), Open MPI (`OMPI_*`), and MPICH, MVAPICH and Intel MPI (`PMI_*`,
`MPI_*`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import secrets
import shlex
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from stepscope.common.files import is_network_filesystem
from stepscope.distributed import rank_and_size
from stepscope.run import is_run_id, new_run_folder, pid_namespace
from stepscope.run.folder import folder_name, own_start, start_above

TORCHRUN = "TORCHELASTIC_RUN_ID"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
RUN_ID = "STEPSCOPE_RUN_ID"
"""Name of the run folder, for ranks that share a disk and no launcher variable of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """Rank of a process and size of its job.

    `local_world_size` is the number of processes on this host, or None if unknown. `job` is
    identical in all processes of the job and unique among concurrent jobs, or None if unknown.
    `address` is that of rank 0's host. `restarts` is torchrun's count of restarts.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = None
    job: tuple[str, ...] | None = None
    address: str | None = None
    restarts: int = 0

    @property
    def several_hosts(self) -> bool:
        """True if some processes are known to run on other hosts."""
        return self.local_world_size is not None and self.local_world_size < self.world_size


class _Variables(NamedTuple):
    """Environment variables of a launcher, separated by spaces.

    It has launched a process in which all `marks` are set. Of the other fields the first variable
    that is set counts. A job's name are the values of `job`, if all of `job_needs` are set.
    """

    marks: str
    rank: str
    local_rank: str
    size: str
    local_size: str = ""
    job: str = ""
    job_needs: str = ""


_TORCH = _Variables(
    "RANK",
    "RANK LOCAL_RANK",  # Lightning's own launcher sets no RANK on the first node
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE LOCAL_SIZE",
    job=f"{TORCHRUN} SLURM_JOB_ID SLURM_STEP_ID MASTER_ADDR MASTER_PORT",
    job_needs="MASTER_ADDR MASTER_PORT",
)
_OPEN_MPI = _Variables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
)
_HYDRA = _Variables(
    "PMI_RANK", "PMI_RANK", "MPI_LOCALRANKID PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"
)
_SLURM = _Variables(
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS",
    job="SLURM_CLUSTER_NAME SLURM_JOB_ID SLURM_STEP_ID SLURM_RESTART_COUNT",
    job_needs="SLURM_JOB_ID",
)
# mpirun in a Slurm job lets srun start one daemon on each node. Its ranks inherit the daemon's
# Slurm variables, so mpirun's own have precedence. srun may set PMI_RANK as well.
_LAUNCHERS = (
    _TORCH,
    _TORCH._replace(marks="LOCAL_RANK WORLD_SIZE"),
    _OPEN_MPI,
    _HYDRA._replace(marks="PMI_RANK MPI_LOCALRANKID"),
    _SLURM,
    _HYDRA,
)


def launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return the launcher's variables; without a launcher the process is the only one."""
    names = next((one for one in _LAUNCHERS if environ.keys() >= {*one.marks.split()}), None)
    if names is None:
        return LauncherEnv()
    by_torch = names.rank == _TORCH.rank
    local = _slurm_tasks(environ) if names is _SLURM else _number(environ, names.local_size)
    job = tuple(environ[key] for key in names.job.split() if environ.get(key))
    return LauncherEnv(
        rank=_number(environ, names.rank),
        local_rank=_number(environ, names.local_rank),
        world_size=_number(environ, names.size, default=1),
        local_world_size=local or None,
        job=job if job and all(map(environ.get, names.job_needs.split())) else None,
        address=environ.get("MASTER_ADDR") if by_torch else None,
        restarts=_number(environ, RESTARTS) if by_torch else 0,
    )


def _own_launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return the rank from the environment, or else from torch.distributed.

    A script that starts its processes by multiprocessing may set ranks in torch alone: the local
    rank is then the order of their start.
    """
    env, group = launch(environ), rank_and_size()
    if env.world_size == 1 and group is not None:
        env = LauncherEnv(rank=group[0], world_size=group[1])
    started = getattr(multiprocessing.current_process(), "_identity", ())
    if env.world_size > 1 and "LOCAL_RANK" not in environ and started and not env.local_rank:
        env = replace(env, local_rank=started[-1] - 1)
    return env


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks on this node, 0 if unknown: "2(x3),1" is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            return 0
        tasks += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID")
    return tasks[node] if node < len(tasks) else 0


def _number(environ: Mapping[str, str], keys: str, default: int = 0) -> int:
    texts = (environ.get(key, "") for key in keys.split())
    return next((int(text) for text in texts if text.isdecimal()), default)


LINKS = ".jobs"  # Folder of the symbolic links, in the folder of all runs.
WINDOW_S = 60.0
"""Maximum difference of the start times of a job's processes, in addition to that of clocks."""
START_ERROR_S = 2.0  # The system counts the start of a process from a whole second.
MAX_TRIES = 100


def rendezvous_folder(
    root: Path, name: str, job: tuple[str, ...], number: int, gathered: float | None = None
) -> Path:
    """Return the run folder shared by all processes of a job; the first one creates it.

    `job` is identical in all processes. A folder belongs to an earlier job if it contains files of
    folder rank `number`, or was begun long before this process or before `gathered`, a time in
    epoch seconds before which no process of the job began. Raises OSError, including on file
    systems without symbolic links.
    """
    links = root / LINKS
    links.mkdir(parents=True, exist_ok=True)
    key = f"{zlib.crc32(repr(job).encode()):08x}"
    with tempfile.TemporaryFile(dir=links) as probe:
        # Links have the time of the disk's clock, from which those of the hosts differ.
        ahead_s = os.fstat(probe.fileno()).st_mtime - time.time()
    oldest = own_start() - WINDOW_S
    if gathered is not None:
        oldest = max(oldest, gathered - START_ERROR_S)
    attempts = (path.suffix[1:] for path in links.glob(f"{key}.*"))
    newest = max((int(attempt) for attempt in attempts if attempt.isdecimal()), default=0)
    for attempt in range(newest, newest + MAX_TRIES):
        link = links / f"{key}.{attempt}"
        with contextlib.suppress(FileExistsError):
            tail = f"{key}-{secrets.token_hex(2)}"
            os.symlink(folder_name(time.time(), name, tail), link)
        folder = root / Path(os.readlink(link)).name
        if link.lstat().st_mtime >= oldest + ahead_s and not _has_files(folder, number):
            folder.mkdir(exist_ok=True)
            return folder
    raise FileExistsError(f"{links}: {MAX_TRIES} jobs of this name began at the same time.")


def is_shared(root: Path, address: str | None) -> bool:
    """Return True if rank 0 at this address writes to the same disk, without a name lookup.

    True on this host, and on a disk that may be a network disk.
    """
    host = socket.gethostname().partition(".")[0]
    if address and (
        address in ("localhost", "::1", host)
        or address.startswith(("127.", f"{host}."))
        or any(address == one.address for ones in psutil.net_if_addrs().values() for one in ones)
    ):
        return True
    return is_network_filesystem(root)


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
    local_world_size: int | None = None
    """Number of processes on this host, or None if unknown."""
    folder_of: str = "job"
    """Whose ranks write here: those of the whole `job`, of this `host`, or this `process` alone."""

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

    Ranks of several hosts share a folder that STEPSCOPE_RUN_ID names, or if they share a disk and
    the launcher names the job. Otherwise each host has a folder with folder ranks from 0. A process
    that cannot see its parent, such as the first one in a container, has a folder alone.
    Raises OSError and RankEnvironmentError.
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
    job = (run_id,) if run_id else env.job
    if job is not None and (run_id or (env.several_hosts and is_shared(root, env.address))):
        key = (*job, str(env.world_size), str(env.restarts))
        folder = rendezvous_folder(root, name, key, env.rank, _gathered(environ))
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


def _gathered(environ: Mapping[str, str]) -> float | None:
    """Return a time before which no process of the job began; None if unknown.

    torchrun's agents of all hosts wait for each other before they start ranks, unless all hosts are
    declared identical. Other launchers may start one host's ranks earlier.
    """
    if TORCHRUN not in environ or environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return None
    return start_above(TORCHRUN)


def announce(place: RankContext, runs: Path | None) -> None:
    """Print the run folder and the command that shows it, once per host, to stderr.

    `runs` is the folder of all runs if that command needs it.
    """
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
