"""Read the launcher's environment variables, and let the ranks find one run folder.

Covered: torchrun and all that goes through it, Accelerate, DeepSpeed, Lightning's own launcher
(`RANK` or `LOCAL_RANK`), srun (`SLURM_*`), Open MPI (`OMPI_*`), and MPICH and Intel MPI (`PMI_*`,
`MPI_*`). A script may set RANK itself from these, but only after this process has begun.
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
from typing import Any

import psutil

from stepscope.common.files import is_network_filesystem
from stepscope.run import is_run_id, new_run_folder, pid_namespace
from stepscope.run.folder import folder_name, own_start, start_above

TORCHRUN = "TORCHELASTIC_RUN_ID"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """A process's number in its job, and how many there are.

    `local_world_size` is None where the launcher does not say how many run on this host. `job` is
    what all processes of the job are told alike, and no other job at the same time; None where
    the launcher says nothing of the kind. `address` is that of rank 0's host. `restarts` counts
    how often torchrun has started all of them anew.
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
        """Say whether some of the processes are known to run on other hosts, or as other nodes."""
        return self.local_world_size is not None and self.local_world_size < self.world_size


def launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return what the environment says; a process that nobody has launched is the only one."""
    by_torch = "RANK" in environ or {"LOCAL_RANK", "WORLD_SIZE"} <= environ.keys()
    if by_torch:
        return _torch(environ)
    for read, marks in _MARKS:
        if marks <= environ.keys():
            return read(environ)
    return LauncherEnv()


def own_launch(environ: Mapping[str, str]) -> LauncherEnv:
    """Return what the environment says of this process, with what it knows of itself beside.

    A script that starts its processes by multiprocessing may tell torch alone which rank each is,
    and leave out which one of this host it is: it is so in the order in which they were started.
    """
    found = launch(environ)
    if found.world_size == 1:
        found = _of_process_group() or found
    started = getattr(multiprocessing.current_process(), "_identity", ())
    if found.world_size > 1 and "LOCAL_RANK" not in environ and started and not found.local_rank:
        found = replace(found, local_rank=started[-1] - 1)
    return found


def _of_process_group() -> LauncherEnv | None:
    """Return what torch.distributed was told by the script; torch is not imported for it."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        return LauncherEnv(rank=dist.get_rank(), world_size=dist.get_world_size())
    except (AttributeError, RuntimeError, ValueError):  # another torch
        return None


def _torch(environ: Mapping[str, str]) -> LauncherEnv:
    """Read the names that torch.distributed itself reads, and torchrun's and DeepSpeed's own."""
    local_rank = _number(environ, "LOCAL_RANK", 0)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    known = tuple(
        environ[key] for key in (TORCHRUN, "SLURM_JOB_ID", "SLURM_STEP_ID") if key in environ
    )
    here = _number(environ, "LOCAL_WORLD_SIZE", _number(environ, "LOCAL_SIZE", 0))
    return LauncherEnv(
        # Lightning's own launcher gives no RANK: on the first node it is the local one.
        rank=_number(environ, "RANK", local_rank),
        local_rank=local_rank,
        world_size=_number(environ, "WORLD_SIZE", 1),
        local_world_size=here or None,
        job=(*known, address, port) if address and port else None,
        address=address,
        restarts=_number(environ, RESTARTS, 0),
    )


def _slurm(environ: Mapping[str, str]) -> LauncherEnv:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", 0)
    return LauncherEnv(
        rank=_number(environ, "SLURM_PROCID", 0),
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        world_size=_number(environ, "SLURM_STEP_NUM_TASKS", 1),
        local_world_size=tasks[node] if node < len(tasks) else None,
        job=tuple(environ.get(name, "") for name in names) if "SLURM_JOB_ID" in environ else None,
    )


def _open_mpi(environ: Mapping[str, str]) -> LauncherEnv:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return LauncherEnv(
        rank=_number(environ, "OMPI_COMM_WORLD_RANK", 0),
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        world_size=_number(environ, "OMPI_COMM_WORLD_SIZE", 1),
        local_world_size=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0) or None,
        job=(job,) if job else None,
    )


def _hydra(environ: Mapping[str, str]) -> LauncherEnv:
    """Read what the starter of MPICH, Intel MPI and MVAPICH gives; it has no name for a job."""
    rank = _number(environ, "PMI_RANK", 0)
    return LauncherEnv(
        rank=rank,
        local_rank=_number(environ, "MPI_LOCALRANKID", rank),
        world_size=_number(environ, "PMI_SIZE", 1),
        local_world_size=_number(environ, "MPI_LOCALNRANKS", 0) or None,
    )


def _tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node: "2(x3),1" is 2, 2, 2, 1; empty for what is no such list."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            return []
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def _number(environ: Mapping[str, str], key: str, default: int) -> int:
    text = environ.get(key, "")
    return int(text) if text.isdecimal() else default


# An mpirun in a job of Slurm has srun start a daemon on each node: its ranks inherit Slurm's
# numbers of that daemon, and so mpirun's own come first. srun may give PMI_RANK as well.
_MARKS = (
    (_open_mpi, {"OMPI_COMM_WORLD_RANK"}),
    (_hydra, {"PMI_RANK", "MPI_LOCALRANKID"}),
    (_slurm, {"SLURM_STEP_NUM_TASKS"}),
    (_hydra, {"PMI_RANK"}),
)


LINKS = ".jobs"
"""Folder of the links, among those of the runs."""
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

    `job` is the same in all its processes. A folder that has one of `files`, which this process
    would write, is an earlier job's, and so is one that was begun long before this process, or
    before `gathered`: a time in epoch seconds after which all processes of the job began, where
    that is known. Raises OSError, also where the disk knows no links.
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
        if link.lstat().st_mtime < oldest or any((folder / file).exists() for file in files):
            continue
        folder.mkdir(exist_ok=True)
        return folder
    raise FileExistsError(f"{links}: {TRIES} jobs of this name began at the same time.")


def is_shared(root: Path, address: str | None) -> bool:
    """Say whether rank 0, whose host has this address, writes on the same disk as this process.

    It does on this host, and on a disk that is not known as local. Nobody is asked, and no name
    looked up.
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
    own = socket.gethostname()
    if address in ("localhost", own) or address.startswith("127.") or address == "::1":
        return True
    if address.split(".")[0] == own.split(".")[0] and not address.replace(".", "").isdecimal():
        return True
    found = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
    return address in found


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
        """Return what run.json says of it."""
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "folder_of": self.folder_of,
        }


def find_place(root: Path, name: str, environ: Mapping[str, str]) -> RankContext:
    """Make this process's run folder under `root`, or find the one that other ranks have made.

    Ranks of several machines share a folder where STEPSCOPE_RUN_ID names it, or where they share a
    disk and the launcher names the job. Otherwise each machine has a folder of its own, in which
    its processes count from 0. So has a process that cannot see its parent, such as the first one
    in a container. Raises OSError and RankError.
    """
    found = own_launch(environ)
    wanted = environ.get(RUN_ID)
    if wanted is not None and not is_run_id(wanted):
        raise RankEnvironmentError(
            f"{RUN_ID}: must be letters, digits, '.', '_' or '-', got {wanted!r}."
        )
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


def _place(folder: Path, number: int, found: LauncherEnv, *, folder_of: str = "job") -> RankContext:
    return RankContext(
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
