"""Each launcher's environment gives the process its rank and the size of its job."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.distributed.rendezvous import LauncherEnv, launch

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED, SRUN, OPEN_MPI])
def test_every_launcher_tells_the_same(environ: dict[str, str]) -> None:
    found = launch(environ)
    assert (found.rank, found.local_rank, found.world_size) == (5, 1, 8)
    assert found.local_world_size == 4


def test_torchrun_inside_of_srun_counts() -> None:
    found = launch(SRUN | TORCHRUN | {"RANK": "6"})
    assert (found.rank, found.restarts) == (6, 2)


def test_mpirun_inside_of_srun_counts() -> None:
    """It has srun start one daemon on each node: its ranks inherit that one's numbers."""
    daemon = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    daemon |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert launch(SRUN | daemon | OPEN_MPI) == launch(OPEN_MPI)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script, and a shell of salloc, have a PROCID and no step of their own.
        {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "1"},
    ],
)
def test_a_process_that_nobody_launched_is_alone(environ: dict[str, str]) -> None:
    assert launch(environ) == LauncherEnv()


def test_a_script_may_set_some_variables_alone() -> None:
    found = launch(SRUN | {"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "1"})
    assert (found.rank, found.world_size) == (5, 8)
    lightning = launch({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"})
    assert (lightning.rank, lightning.local_rank, lightning.world_size) == (1, 1, 2)


@pytest.mark.parametrize(("text", "here"), [("4(x2)", 4), ("2(x2),1", None), ("", None)])
def test_tasks_of_each_node_as_slurm_writes_them(text: str, here: Any) -> None:
    assert launch(SRUN | {"SLURM_STEP_TASKS_PER_NODE": text}).local_world_size == here
