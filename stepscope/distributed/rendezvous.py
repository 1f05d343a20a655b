"""Read the launcher's environment variables, and let the ranks find one run folder.

Covered: torchrun and all that goes through it, Accelerate, DeepSpeed, Lightning's own launcher
(`RANK` or `LOCAL_RANK`), srun (`SLURM_*`), Open MPI (`OMPI_*`), and MPICH, MVAPICH and Intel MPI
(`PMI_*`, `MPI_*`).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """A process's number in its job, and how many there are.

    `local_world_size` is None where the launcher does not set how many run on this host. `job` is
    the same in all processes of the job, and in no other job at the same time; None where the
    launcher sets nothing of the kind. `address` is that of rank 0's host. `restarts` counts how
    often torchrun has started all of them anew.
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
        """Return True if some of the processes are known to run on other hosts or nodes."""
        return self.local_world_size is not None and self.local_world_size < self.world_size


class _Variables(NamedTuple):
    """A launcher's environment variables: its marks, and for each number the first that is set.

    Names are separated by spaces. A job's name are those of `job`, if all of `job_needs` are set.
    """

    marks: str
    rank: str
    local_rank: str
    size: str
    local_size: str = ""
    job: str = ""
    job_needs: str = ""


# Lightning's own launcher sets no RANK: on the first node it is the local one.
_TORCH = _Variables(
    "RANK",
    "RANK LOCAL_RANK",
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
# An mpirun in a job of Slurm has srun start a daemon on each node: its ranks inherit Slurm's
# numbers of that daemon, and so mpirun's own come first. srun may give PMI_RANK as well.
_LAUNCHERS = (
    _TORCH,
    _TORCH._replace(marks="LOCAL_RANK WORLD_SIZE"),
    _OPEN_MPI,
    _HYDRA._replace(marks="PMI_RANK MPI_LOCALRANKID"),
    _SLURM,
    _HYDRA,
)


def launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return the place of this process by its environment; without a launcher it is the only one.

    A script may set RANK itself, but only after this process has begun.
    """
    names = next((one for one in _LAUNCHERS if environ.keys() >= {*one.marks.split()}), None)
    if names is None:
        return LauncherEnv()
    by_torch = names.rank == _TORCH.rank
    here = _slurm_tasks(environ) if names is _SLURM else _number(environ, names.local_size)
    job = tuple(environ[key] for key in names.job.split() if environ.get(key))
    return LauncherEnv(
        rank=_number(environ, names.rank),
        local_rank=_number(environ, names.local_rank),
        world_size=_number(environ, names.size, default=1),
        local_world_size=here or None,
        job=job if job and all(map(environ.get, names.job_needs.split())) else None,
        address=environ.get("MASTER_ADDR") if by_torch else None,
        restarts=_number(environ, RESTARTS) if by_torch else 0,
    )


def own_launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return the place of this process by its environment, torch.distributed and its parent.

    A script that starts its processes by multiprocessing may give torch alone their ranks: the
    local rank is then the order in which they were started.
    """
    found, group = launch(environ), rank_and_size()
    if found.world_size == 1 and group is not None:
        found = LauncherEnv(rank=group[0], world_size=group[1])
    started = getattr(multiprocessing.current_process(), "_identity", ())
    if found.world_size > 1 and "LOCAL_RANK" not in environ and started and not found.local_rank:
        found = replace(found, local_rank=started[-1] - 1)
    return found


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return the tasks of this node: "2(x3),1" is 2, 2, 2, 1; 0 where they are not known."""
    tasks: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            return 0
        tasks += [int(found[1])] * int(found[2] or 1)
    node = _number(environ, "SLURM_NODEID")
    return tasks[node] if node < len(tasks) else 0


def _number(environ: Mapping[str, str], keys: str, default: int = 0) -> int:
    texts = (environ.get(key, "") for key in keys.split())
    return next((int(text) for text in texts if text.isdecimal()), default)


LINKS = ".jobs"  # Folder of the links, among those of the runs.
WINDOW_S = 60.0
"""The processes of a job are started together, within this time and the clocks' difference."""
ROUNDED_S = 2.0
"""What the start of a process may be wrong by: the system counts it from a whole second."""
TRIES = 100


def meet(
    root: Path,
    name: str,
    job: tuple[str, ...],
    files: tuple[str, ...],
    gathered: float | None = None,
) -> Path:
    """Return the folder of a job under `root`, and make it where this process is the first.

    `job` is the same in all its processes. A folder is an earlier job's if it has one of `files`,
    which this process would write, or was begun long before this process or before `gathered`: a
    time in epoch seconds after which all processes of the job began. Raises OSError, also where
    the disk has no links.
    """
    links = root / LINKS
    links.mkdir(parents=True, exist_ok=True)
    key = f"{zlib.crc32(repr(job).encode()):08x}"
    ahead_s = _now_of_disk(links) - time.time()
    oldest = ahead_s + own_start() - WINDOW_S
    if gathered is not None:
        oldest = max(oldest, ahead_s + gathered - ROUNDED_S)
    for number in range(_newest(links, key), _newest(links, key) + TRIES):
        link = links / f"{key}.{number}"
        with contextlib.suppress(FileExistsError):
            tail = f"{key}-{secrets.token_hex(2)}"
            os.symlink(folder_name(time.time(), name, tail), link)
        folder = root / Path(os.readlink(link)).name
        if link.lstat().st_mtime < oldest or _any_in(folder, files):
            continue
        folder.mkdir(exist_ok=True)
        return folder
    raise FileExistsError(f"{links}: {TRIES} jobs of this name began at the same time.")


def is_shared(root: Path, address: str | None) -> bool:
    """Return True if rank 0, whose host has this address, writes on the same disk.

    It does on this host, and on a disk that is not known as local. No name is looked up.
    """
    return _is_here(address) or is_network_filesystem(root)


def _newest(links: Path, key: str) -> int:
    numbers = (path.suffix[1:] for path in links.glob(f"{key}.*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _now_of_disk(links: Path) -> float:
    """Return the time by the clock that stamps the files: hosts differ, their disk does not."""
    with tempfile.TemporaryFile(dir=links) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _is_here(address: str | None) -> bool:
    if not address:
        return False
    host = socket.gethostname().partition(".")[0]
    if address in ("localhost", "::1", host) or address.startswith(("127.", f"{host}.")):
        return True
    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    return any(entry.address == address for entry in entries)


RUN_ID = "STEPSCOPE_RUN_ID"
"""Names the run folder; for ranks that share a disk and do not find each other by themselves."""


class RankEnvironmentError(Exception):
    """The environment variables of the run are wrong; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class RankContext:
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
        """Return its entries in run.json."""
        keys = ("rank", "local_rank", "world_size", "local_world_size", "folder_of")
        return {key: getattr(self, key) for key in keys}


def find_place(root: Path, name: str, environ: Mapping[str, str]) -> RankContext:
    """Make this process's run folder under `root`, or find the one that other ranks have made.

    Ranks of several machines share a folder where STEPSCOPE_RUN_ID names it, or where they share a
    disk and the launcher names the job. Otherwise each machine has a folder of its own, in which
    its processes count from 0. So has a process that cannot see its parent, such as the first one
    in a container. Raises OSError and RankEnvironmentError.
    """
    found = own_launch(environ)
    folder, number, folder_of = _folder(root, name, environ, found)
    ranks = found.rank, found.local_rank, found.world_size, found.local_world_size
    return RankContext(folder, number, *ranks, folder_of)


def _folder(
    root: Path, name: str, environ: Mapping[str, str], found: LauncherEnv
) -> tuple[Path, int, str]:
    """Return the folder, the number in it, and whose ranks write there."""
    wanted, files = environ.get(RUN_ID), _files(found.rank)
    if wanted is not None and not is_run_id(wanted):
        raise RankEnvironmentError(
            f"{RUN_ID}: must be letters, digits, '.', '_' or '-', got {wanted!r}."
        )
    if wanted:
        folder = root / (f"{wanted}-restart{found.restarts}" if found.restarts else wanted)
        if not _any_in(folder, files):
            folder.mkdir(parents=True, exist_ok=True)
            return folder, found.rank, "job"
    job = (wanted,) if wanted else found.job
    if job is not None and (wanted or (found.several_hosts and is_shared(root, found.address))):
        kind = (*job, str(found.world_size), str(found.restarts))
        return meet(root, name, kind, files, _gathered(environ)), found.rank, "job"
    shared = _name_after_parent(name, environ) if found.world_size > 1 else None
    if shared is not None and not _any_in(root / shared, _files(found.local_rank)):
        (root / shared).mkdir(parents=True, exist_ok=True)
        is_whole = found.local_world_size == found.world_size
        return root / shared, found.local_rank, "job" if is_whole else "host"
    # Else the name of an earlier run: its parent, such as a shell, has started this one as well.
    return new_run_folder(root, name), 0, "process"


def _files(number: int) -> tuple[str, ...]:
    """Return the files that a process of this number writes first."""
    return f"rank{number}.sqlite", f"rank{number}.json"


def _any_in(folder: Path, files: tuple[str, ...]) -> bool:
    return any((folder / file).exists() for file in files)


def _gathered(environ: Mapping[str, str]) -> float | None:
    """Return a time before which no process of the job began; None if unknown.

    torchrun's agents of all hosts wait for each other before they start ranks, unless all hosts are
    declared identical. Other launchers may start one host's ranks earlier.
    """
    if TORCHRUN not in environ or environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return None
    return start_above(TORCHRUN)


def announce(place: RankContext, runs: Path | None) -> None:
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
