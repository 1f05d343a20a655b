"""Distributed runs on this machine, started by torchrun.

server ─> torchrun ─> a process per rank (`rank_worker.py`), each in its own session
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from stepscope.distributed import ONE_MACHINE
from stepscope.host.child_process import kill_tree, signal_all
from stepscope.host.environment import granted_cores
from stepscope.run import RunError, RunStatus, read_run
from stepscope.run.rank_info import rank_numbers
from stepscope.session.stop import rank_processes
from stepscope.store.writer import note_end
from trainer.config import RunConfig
from trainer.runners.child_process import SHUT_DOWN, WORKER_LOG, ChildRun, log_text, not_started

MODULE = "trainer.runners.rank_worker"


class TorchrunRun(ChildRun):
    """A distributed run. Methods: see ThreadRun."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        arguments = ["-m", "torch.distributed.run", *torchrun_arguments(config, folder.resolve())]
        threads = {"OMP_NUM_THREADS": str(threads_per_rank(config, granted_cores()))}
        super().__init__(folder, arguments, env=os.environ | threads)

    def end_with_server(self) -> None:
        self.note_stopped(f"{SHUT_DOWN}.")

    def note_stopped(self, reason: str) -> None:
        """Record the end of ranks that `stop` has killed."""
        for number in rank_numbers(self.folder):
            note_end(self.folder, RunStatus.STOPPED, reason, number=number)

    def _kill(self) -> None:
        """Kill torchrun and the ranks, which lead sessions with their DataLoader workers."""
        ranks: list[psutil.Process] = []
        with contextlib.suppress(RunError):
            ranks = [process for _, process in rank_processes(read_run(self.folder))]
        kill_tree(self._process.pid)
        signal_all(ranks, signal.SIGKILL)

    def _note_end(self, code: int) -> None:
        """Record the end of ranks that have not begun; the others have recorded theirs."""
        printed = log_text(self.folder / WORKER_LOG)
        if self._stopping:
            not_started(self.folder)
        elif code < 0 or "SignalException: " in printed:
            not_started(self.folder, "torchrun was ended before the ranks had started.")
        elif code != 0:
            reason = f"The ranks could not start (exit code {code}). {WORKER_LOG} has the error."
            not_started(self.folder, reason)


def torchrun_arguments(config: RunConfig, folder: Path) -> list[str]:
    return [
        *ONE_MACHINE,
        f"--nproc-per-node={config.devices_per_node}",
        f"--rdzv-id={folder.name}",
        *("-m", MODULE, str(folder)),
    ]


def threads_per_rank(config: RunConfig, cores: int) -> int:
    """Return OMP_NUM_THREADS of each rank: by default all ranks share half the cores.

    Without the variable torchrun sets it to 1.
    """
    return config.num_threads or max(1, cores // 2 // config.devices_per_node)
