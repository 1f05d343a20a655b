"""A job of several ranks on this machine, started by torchrun: DDP and FSDP.

server ─> torchrun (`agent.py`) ─> a process a rank (`rank_worker.py`), each in a session of its own
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from stepscope.run import RunError, RunStatus, rank_pids, read_run
from stepscope.run.folder import send_signal
from stepscope.session.stop import rank_processes
from trainer.config import RunConfig
from trainer.launch_commands import ONE_MACHINE, rank_variables
from trainer.runners.job_outcome import JobOutcome, end_of, note_job_end, was_told_to_end
from trainer.runners.process import (
    WORKER_LOG,
    ChildRun,
    interrupted_by_shutdown,
    last_step,
    not_started,
)
from trainer.runners.rank_shutdown import SERVER_SIGNAL
from trainer.runners.restart_attempts import attempt_folder, ended_badly, newest_number

ORPHANS_S = 30.0  # Time in which ranks without a torchrun end, at the latest.
LOOK_S = 0.2


class TorchrunRun(ChildRun):
    """A job of several ranks; `folder` is that of its newest attempt."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._max_restarts = config.max_restarts
        arguments = torchrun_arguments(config, folder.resolve())
        environment = os.environ | rank_variables(config, os.cpu_count() or 1)
        super().__init__(folder, ["-m", "trainer.runners.agent", *arguments], env=environment)

    @property
    def folder(self) -> Path:
        """The folder of the newest attempt: torchrun starts all ranks again when one has failed."""
        return attempt_folder(self._first, newest_number(self._first, self._max_restarts))

    def goes_on(self) -> bool:
        """Return True while torchrun is about to start the ranks again, after a failure."""
        left = newest_number(self._first, self._max_restarts) < self._max_restarts
        return left and self.alive() and not self._stopping and ended_badly(self.folder)

    def stop(self, timeout_s: float) -> bool:
        """End all ranks at the same step, as the server ends; what is left is killed."""
        return self._stop(SERVER_SIGNAL, timeout_s)

    def end_now(self, timeout_s: float) -> bool:
        """The same, while the server goes on."""
        return self._stop(signal.SIGTERM, timeout_s)

    def end_with_server(self) -> None:
        """Note the end of the ranks that `stop` has killed."""
        reason = interrupted_by_shutdown(last_step(self.folder)).rstrip(".")
        note_job_end(self.folder, JobOutcome(RunStatus.STOPPED, reason))

    def _kill(self) -> None:
        """Kill torchrun and the ranks, each of which leads a session with its loaders' workers."""
        ranks: set[psutil.Process] = set()
        with contextlib.suppress(RunError):
            ranks |= {process for _, process in rank_processes(read_run(self.folder))}
        with contextlib.suppress(psutil.Error):
            ranks |= {*psutil.Process(self._process.pid).children(recursive=True)}
        self._process.kill()  # first, so that it starts none again
        for process in ranks:
            with contextlib.suppress(psutil.Error, OSError):
                send_signal(process, signal.SIGKILL)

    def _note_end(self, code: int) -> None:
        folder, printed = self.folder, self._first / WORKER_LOG
        if code < 0:
            self._await_ranks(folder)
        if self._stopping:
            not_started(folder)
        elif code < 0 or was_told_to_end(printed):
            not_started(folder, "torchrun was ended before the ranks had started.")
        elif code != 0:
            note_job_end(folder, end_of(folder, printed))

    def _await_ranks(self, folder: Path) -> None:
        """Wait for ranks whose torchrun was killed: they see it and stop by themselves."""
        until = time.monotonic() + ORPHANS_S
        with contextlib.suppress(RunError):
            # While it is pending, run.json has the pid of this process.
            while {*rank_pids(read_run(folder))} - {os.getpid()} and time.monotonic() < until:
                time.sleep(LOOK_S)


def torchrun_arguments(config: RunConfig, folder: Path) -> list[str]:
    """Return the arguments with which torchrun starts the ranks of one machine."""
    return [
        *ONE_MACHINE,
        f"--nproc-per-node={config.devices_per_node}",
        f"--rdzv-id={folder.name}",
        f"--max-restarts={config.max_restarts}",
        *("-m", "trainer.runners.rank_worker", str(folder)),
    ]
