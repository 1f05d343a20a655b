"""A job of several ranks on this machine, started by torchrun: DDP and FSDP.

server ─> torchrun (`agent.py`) ─> a process a rank (`rank_worker.py`), each in a session of its own
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from stepscope.common.files import open_for_append
from stepscope.run import RunError, RunStatus, rank_pids, read_run
from stepscope.run.folder import send_signal
from stepscope.session.stop import rank_processes
from trainer.config import RunConfig
from trainer.launch_commands import ONE_MACHINE, rank_variables
from trainer.runners.job_outcome import JobEnd, end_of, note_job_end, was_told_to_end
from trainer.runners.rank_shutdown import SERVER_SIGNAL
from trainer.runners.restart_attempts import attempt_folder, ended_badly, newest_number
from trainer.runners.unstarted_run import WORKER_LOG, cut_off, not_started

log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parents[2]
KILLED_S = 2.0
"""Time that the system may need to end the killed processes of a job."""
ORPHANS_S = 30.0
"""Time in which ranks without a torchrun end, at the latest."""
LOOK_S = 0.2


class TorchrunRun:
    """A job of several ranks; `folder` is that of its newest attempt."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._first = folder.resolve()
        self._max_restarts = config.max_restarts
        self._stopping = False
        # Unbuffered: nothing is written to it, and nothing must be tried again at close.
        with open(open_for_append(folder / WORKER_LOG, truncate=True), "wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "trainer.runners.agent"),
                    *torchrun_arguments(config, self._first),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
                env=os.environ | rank_variables(config, os.cpu_count() or 1),
                start_new_session=True,
                bufsize=0,
            )
        self._waiter = threading.Thread(target=self._wait, name="stepscope-child", daemon=True)
        self._waiter.start()

    @property
    def folder(self) -> Path:
        """The folder of the newest attempt: torchrun starts all ranks again when one has failed."""
        return attempt_folder(self._first, newest_number(self._first, self._max_restarts))

    def alive(self) -> bool:
        return self._waiter.is_alive()

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

    def _stop(self, told: signal.Signals, timeout_s: float) -> bool:
        self._stopping = True
        if self._process.poll() is None:
            self._process.send_signal(told)
        self._waiter.join(timeout_s)
        if not self._waiter.is_alive():
            return True
        log.warning("the ranks did not stop within %.1f s: killed", timeout_s)
        self._kill()
        self._waiter.join(KILLED_S)
        return False

    def end_with_server(self) -> None:
        """Note the end of the ranks that `stop` has killed."""
        folder, step = self.folder, 0
        with contextlib.suppress(RunError):
            step = int(read_run(folder).run_json.get("step", 0))
        note_job_end(folder, JobEnd(RunStatus.STOPPED, cut_off(step).rstrip(".")))

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

    def _wait(self) -> None:
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
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
        while time.monotonic() < until and any(_pids(folder)):
            time.sleep(LOOK_S)


def _pids(folder: Path) -> list[int]:
    """Return the numbers of the ranks that run."""
    with contextlib.suppress(RunError):
        run = read_run(folder)
        return [pid for pid in rank_pids(run) if pid != os.getpid()]  # ours while it is pending
    return []


def torchrun_arguments(config: RunConfig, folder: Path) -> list[str]:
    """Return the arguments with which torchrun starts the ranks of one machine."""
    return [
        *ONE_MACHINE,
        f"--nproc-per-node={config.ranks}",
        f"--rdzv-id={folder.name}",
        f"--max-restarts={config.max_restarts}",
        *("-m", "trainer.runners.rank_worker", str(folder)),
    ]
