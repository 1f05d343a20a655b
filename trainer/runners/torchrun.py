"""A distributed run on this machine, started by torchrun: DDP and FSDP.

server ─> torchrun (`agent.py`) ─> a process per rank (`rank_worker.py`), each in its own session
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from stepscope.distributed import ONE_MACHINE
from stepscope.host.environment import granted_cores
from stepscope.run import RunError, RunStatus, own_ranks, read_run
from stepscope.session.stop import rank_processes
from trainer.config import RunConfig
from trainer.launch_commands import rank_variables
from trainer.runners.child_process import SHUT_DOWN, WORKER_LOG, ChildRun, not_started
from trainer.runners.job_outcome import JobOutcome, end_of, ended_by_signal, note_job_end
from trainer.runners.restart_attempts import attempt_folder, ended_badly, newest_number

ORPHANS_S = 30.0  # timeout for the end of ranks whose torchrun was killed
POLL_S = 0.2


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
        *("-m", "trainer.runners.rank_worker", str(folder)),
    ]
