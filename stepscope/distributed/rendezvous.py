"""What the launcher of a distributed job tells a process in its environment.

Covered: torchrun and all that goes through it, Accelerate, DeepSpeed, Lightning's own launcher
(`RANK` or `LOCAL_RANK`), srun (`SLURM_*`), Open MPI (`OMPI_*`), and MPICH and Intel MPI (`PMI_*`,
`MPI_*`). A script may set RANK itself from these, but only after this process has begun.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

TORCHRUN = "TORCHELASTIC_RUN_ID"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
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


def launch(environ: Mapping[str, str]) -> Launch:
    """Return what the environment says; a process that nobody has launched is the only one."""
    by_torch = "RANK" in environ or {"LOCAL_RANK", "WORLD_SIZE"} <= environ.keys()
    if by_torch:
        return _torch(environ)
    for read, marks in _MARKS:
        if marks <= environ.keys():
            return read(environ)
    return Launch()


def own_launch(environ: Mapping[str, str]) -> Launch:
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


def _of_process_group() -> Launch | None:
    """Return what torch.distributed was told by the script; torch is not imported for it."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        return Launch(rank=dist.get_rank(), world_size=dist.get_world_size())
    except (AttributeError, RuntimeError, ValueError):  # another torch
        return None


def _torch(environ: Mapping[str, str]) -> Launch:
    """Read the names that torch.distributed itself reads, and torchrun's and DeepSpeed's own."""
    local_rank = _number(environ, "LOCAL_RANK", 0)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    known = tuple(
        environ[key] for key in (TORCHRUN, "SLURM_JOB_ID", "SLURM_STEP_ID") if key in environ
    )
    here = _number(environ, "LOCAL_WORLD_SIZE", _number(environ, "LOCAL_SIZE", 0))
    return Launch(
        # Lightning's own launcher gives no RANK: on the first node it is the local one.
        rank=_number(environ, "RANK", local_rank),
        local_rank=local_rank,
        world_size=_number(environ, "WORLD_SIZE", 1),
        local_world_size=here or None,
        job=(*known, address, port) if address and port else None,
        address=address,
        restarts=_number(environ, RESTARTS, 0),
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", 0)
    return Launch(
        rank=_number(environ, "SLURM_PROCID", 0),
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        world_size=_number(environ, "SLURM_STEP_NUM_TASKS", 1),
        local_world_size=tasks[node] if node < len(tasks) else None,
        job=tuple(environ.get(name, "") for name in names) if "SLURM_JOB_ID" in environ else None,
    )


def _open_mpi(environ: Mapping[str, str]) -> Launch:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return Launch(
        rank=_number(environ, "OMPI_COMM_WORLD_RANK", 0),
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        world_size=_number(environ, "OMPI_COMM_WORLD_SIZE", 1),
        local_world_size=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0) or None,
        job=(job,) if job else None,
    )


def _hydra(environ: Mapping[str, str]) -> Launch:
    """Read what the starter of MPICH, Intel MPI and MVAPICH gives; it has no name for a job."""
    rank = _number(environ, "PMI_RANK", 0)
    return Launch(
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
