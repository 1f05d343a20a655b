"""Distributed runs: on this machine, started by torchrun, and commands for several nodes.

server ─> torchrun (`agent.py`) ─> a process per rank (`rank_worker.py`), each in its own session

torchrun's c10d rendezvous assigns the ranks. All nodes share the run folder at the same path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from stepscope.distributed import ONE_MACHINE
from stepscope.host.environment import granted_cores
from stepscope.run import RunError, RunStatus, own_ranks, read_run
from stepscope.session.stop import rank_processes
from trainer.config import RunConfig, defaults
from trainer.custom_workload import VARIABLE as OWN_WORKLOAD
from trainer.datasets import VARIABLE as DATA
from trainer.runners.child_process import SHUT_DOWN, WORKER_LOG, ChildRun, not_started
from trainer.runners.job_outcome import JobOutcome, end_of, ended_by_signal, note_job_end
from trainer.runners.restart_attempts import attempt_folder, ended_badly, newest_number

ORPHANS_S = 30.0  # timeout for the end of ranks whose torchrun was killed
POLL_S = 0.2
MODULE = "trainer.runners.rank_worker"
PORT = 29500  # torchrun's default
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,39}")
_SLURM_PORTS = (20_000, 20_000)  # first port and count: two jobs on a node need different ports


class TorchrunRun(ChildRun):
    """A distributed run; `folder` is that of its newest attempt."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._max_restarts = config.max_restarts
        arguments = torchrun_arguments(config, folder.resolve())
        environment = os.environ | rank_variables(config, granted_cores())
        super().__init__(folder, ["-m", "trainer.runners.agent", *arguments], env=environment)

    @property
    def folder(self) -> Path:
        return attempt_folder(self._first, newest_number(self._first, self._max_restarts))

    def goes_on(self) -> bool:
        left = newest_number(self._first, self._max_restarts) < self._max_restarts
        return left and self.alive() and not self._stopping and ended_badly(self.folder)

    def end_with_server(self) -> None:
        note_job_end(self.folder, JobOutcome(RunStatus.STOPPED, SHUT_DOWN))

    def _kill(self) -> None:
        """Kill torchrun and the ranks, which lead sessions with their DataLoader workers."""
        ranks: set[psutil.Process] = set()
        with contextlib.suppress(RunError):
            ranks |= {process for _, process in rank_processes(read_run(self.folder))}
        with contextlib.suppress(psutil.Error):
            ranks |= {*psutil.Process(self._process.pid).children(recursive=True)}
        self._process.kill()  # first, so that it restarts no rank
        for process in ranks:
            with contextlib.suppress(psutil.Error, OSError):
                process.kill()

    def _note_end(self, code: int) -> None:
        folder, printed = self.folder, self._first / WORKER_LOG
        if code < 0:  # ranks stop when their torchrun was killed
            until = time.monotonic() + ORPHANS_S
            with contextlib.suppress(RunError):
                # A pending run.json has the pid of this process.
                while time.monotonic() < until and any(
                    rank.run_json["pid"] != os.getpid() for rank in own_ranks(read_run(folder))
                ):
                    time.sleep(POLL_S)
        if self._stopping:
            not_started(folder)
        elif code < 0 or ended_by_signal(printed):
            not_started(folder, "torchrun was ended before the ranks had started.")
        elif code != 0:
            note_job_end(folder, end_of(folder, printed))


def torchrun_arguments(config: RunConfig, folder: Path) -> list[str]:
    return [
        *ONE_MACHINE,
        f"--nproc-per-node={config.devices_per_node}",
        f"--rdzv-id={folder.name}",
        f"--max-restarts={config.max_restarts}",
        *("-m", MODULE, str(folder)),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """A job to start by hand. Raises ValueError for an invalid host.

    `folder` is the run folder, `host` the address of the first node, `project` the path of this
    program on all nodes, `environment` the variables of the ranks such as OMP_NUM_THREADS.
    """

    config: RunConfig
    folder: Path
    project: Path
    host: str = "localhost"
    port: int = PORT
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ValueError(
                f"host: must be a host name or an address, got {self.host[:60]!r}. "
                "Give the name by which the other nodes reach the first one."
            )


def rank_variables(config: RunConfig, cores: int) -> dict[str, str]:
    """Return the environment variables of the ranks on a node with `cores` cores.

    Without OMP_NUM_THREADS torchrun sets it to 1. By default all ranks share half the cores.
    torchrun's shared store keeps the addresses of a former attempt, to which new ranks would
    connect.
    """
    threads = config.num_threads or max(1, cores // 2 // config.devices_per_node)
    found = {"OMP_NUM_THREADS": str(threads), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if config.time_collectives:
        found["TORCH_NCCL_ENABLE_TIMING"] = "1"
    return found


def inherited(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of this process with the data folder and the custom workload."""
    return {name: environ[name] for name in (DATA, OWN_WORKLOAD) if environ.get(name)}


def settings_json(config: RunConfig) -> str:
    """Return the settings that differ from the workload's defaults, as one line of JSON."""
    base = defaults(config.workload, config.device).to_dict()
    always = {"workload", "device"}
    values = config.to_dict().items()
    return json.dumps({name: v for name, v in values if name in always or v != base[name]})


def machine_command(launch: LaunchSpec) -> str:
    """Return the shell command to run on each node, over several continued lines."""
    config = launch.config
    endpoint = f"{launch.host}:{launch.port}"
    variables = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    words = _torchrun(config, endpoint, launch.folder.name)
    lines = [f"cd {shlex.quote(str(launch.project))} &&", *variables, *words]
    lines += [f"-m {MODULE} {shlex.quote(str(launch.folder))}"]
    lines += [f"--config {shlex.quote(settings_json(config))}"]
    return " \\\n  ".join(lines)


def slurm_script(launch: LaunchSpec) -> str:
    """Return a script for sbatch: one torchrun per node, which starts the ranks of its GPUs.

    The job number is part of the run name: a requeued job resumes from its last checkpoint. Slurm
    sends SIGTERM a minute before the time limit, and all ranks stop at the same step.
    """
    config = launch.config
    cores = config.devices_per_node * ((config.num_threads or 1) + 1 + config.num_workers)
    options = {
        "job-name": str(config.workload),
        "nodes": str(config.num_nodes),
        "ntasks-per-node": "1",
        **({} if config.device == "cpu" else {"gpus-per-node": str(config.devices_per_node)}),
        "cpus-per-task": str(cores),
        "output": "%x-%j.log",
        "signal": "TERM@60",
    }
    words = _torchrun(config, '"$head_node:$port"', '"$SLURM_JOB_ID"')
    command = ["srun", *words, f'-m {MODULE} "$folder"', '--config "$settings"']
    variables = {k: v for k, v in launch.environment.items() if k != "OMP_NUM_THREADS"}
    threads = config.num_threads or f"$(( SLURM_CPUS_PER_TASK / 2 / {config.devices_per_node} ))"
    first, count = _SLURM_PORTS
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        "set -euo pipefail",
        f"cd {shlex.quote(str(launch.project))}",
        "# The first node of the job hosts the rendezvous.",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'head_node="${nodes[0]}"',
        f"port=$(( {first} + SLURM_JOB_ID % {count} ))",
        f'folder={shlex.quote(str(launch.folder))}"-$SLURM_JOB_ID"',
        f"settings={shlex.quote(settings_json(config))}",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"threads={threads}",
        "export OMP_NUM_THREADS=$(( threads > 0 ? threads : 1 ))",
        "# Since Slurm 22.05 srun does not inherit this from sbatch.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        " \\\n  ".join(command),
    ]
    return "\n".join(lines) + "\n"


def _torchrun(config: RunConfig, endpoint: str, job: str) -> list[str]:
    return [
        "torchrun",
        f"--nnodes {config.num_nodes}",
        f"--nproc-per-node {config.devices_per_node}",
        "--rdzv-backend c10d",
        f"--rdzv-endpoint {endpoint}",
        f"--rdzv-id {job}",
        f"--max-restarts {config.max_restarts}",
    ]
