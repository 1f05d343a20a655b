"""Each launcher's environment gives the process its number, and the job a name on all hosts."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.distributed.rendezvous import LauncherEnv, launch

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "sweep",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
DEEPSPEED = {
    name: TORCHRUN[name]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
} | {"LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node1-4242@1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED, SRUN, OPEN_MPI, HYDRA])
def test_every_launcher_tells_the_same(environ: dict[str, str]) -> None:
    found = launch(environ)
    assert (found.rank, found.local_rank, found.world_size) == (5, 1, 8)
    assert found.local_world_size == 4
    assert found.several_hosts
    assert (found.job is None) == (environ is HYDRA)
    own = {"RANK", "LOCAL_RANK", "CROSS_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}
    own |= {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK"}
    other = {key: "0" if key in own else value for key, value in environ.items()}
    assert (launch(other).job, launch(other).rank) == (found.job, 0)


@pytest.mark.parametrize("mpirun", [OPEN_MPI, HYDRA])
@pytest.mark.parametrize(
    "daemon",
    [
        # mpirun has srun start one daemon on each node: its ranks inherit that one's numbers.
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"},
        # It was called in a shell of `srun --pty`.
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"},
    ],
)
def test_mpirun_inside_of_srun_counts(mpirun: dict[str, str], daemon: dict[str, str]) -> None:
    assert launch(SRUN | daemon | {"SLURM_LOCALID": "0"} | mpirun) == launch(mpirun)


def test_srun_counts_where_it_starts_programs_of_mpi_itself_but_not_torchrun() -> None:
    """As with --mpi=pmi2: the numbers are the same, and Slurm knows the job and this host."""
    assert launch(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}) == launch(SRUN)
    found = launch(SRUN | TORCHRUN | {"RANK": "6"})
    assert (found.rank, found.restarts, found.address) == (6, 2, "node1")


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


@pytest.mark.parametrize(
    ("text", "node", "here"),
    [("2(x2),1", 2, 1), ("3", 0, 3), ("3", 1, None), ("odd", 0, None), ("", 0, None)],
)
def test_tasks_of_each_node_as_slurm_writes_them(text: str, node: int, here: Any) -> None:
    environ = SRUN | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}
    assert launch(environ).local_world_size == here
