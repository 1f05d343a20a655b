"""A run in a child process, with its own GIL and CUDA context."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.common.files import open_for_append
from stepscope.host.child_process import ChildProcess
from stepscope.recorder.recorder import first_run_json
from stepscope.recorder.recovery import note_end
from stepscope.run import RunError, RunKind, RunStatus, read_run, write_run_json
from trainer.config import RunConfig
from trainer.runners.child_process import PROJECT
from trainer.runners.job_outcome import log_text

log = logging.getLogger(__name__)

WORKER_LOG = "worker.log"  # output of the training process, or of torchrun
SHUT_DOWN = "The server was shut down while the run was busy; an unfinished checkpoint is lost"


class ChildRun(ChildProcess):
    """A run in a child process whose output is written to worker.log.

    Its methods are those of ThreadRun.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], **options: Any) -> None:
        self._first = folder.resolve()
        command = [sys.executable, *arguments]
        with open(open_for_append(folder / WORKER_LOG, truncate=True), "wb") as log_file:
            super().__init__(
                command, stdout=log_file, stderr=subprocess.STDOUT, cwd=PROJECT, **options
            )
        self._waiter.start()

    @property
    def folder(self) -> Path:
        return self._first

    def alive(self) -> bool:
        return self._waiter.is_alive()

    def goes_on(self) -> bool:
        return False

    def stop(self, timeout_s: float) -> bool:
        self._stopping = True
        if self._process.poll() is None:
            self._process.terminate()
        self._waiter.join(timeout_s)
        if not self._waiter.is_alive():
            return True
        log.warning("the training process did not stop within %.1f s: killed", timeout_s)
        self._kill()
        self._waiter.join(2.0)
        return False

    def _kill(self) -> None:
        self._kill_group()

    def _wait(self) -> None:
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._note_end(code)

    def _note_end(self, code: int) -> None:
        """Record the end of the process in run.json, unless the run has done so."""
        raise NotImplementedError


class ProcessRun(ChildRun):
    """A run in a child process, `trainer.runners.worker`."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        first_line = json.dumps(config.to_dict()).encode() + b"\n"
        arguments = ["-m", "trainer.runners.worker", str(folder.resolve())]
        super().__init__(folder, arguments, first_line=first_line)

    def end_with_server(self) -> None:
        note_end(self.folder, RunStatus.STOPPED, f"{SHUT_DOWN}.")

    def _note_end(self, code: int) -> None:
        if self._stopping:
            not_started(self.folder)
        elif code != 0:
            tail = log_text(self.folder / WORKER_LOG).strip().splitlines()[-1:]
            reason = f"The training process could not start (exit code {code}): {' '.join(tail)}"
            not_started(self.folder, reason)


def write_pending(folder: Path, config: RunConfig, reason: str, **more: Any) -> None:
    """Write the run.json that is valid until the recorder of the run writes its own."""
    first = first_run_json(config.workload, RunKind.TRAINER, config.to_dict(), rank=0)
    now = time.time()  # the clock of this long-lived process may differ by now
    write_run_json(folder, first | {"created": now, "heartbeat": now, "reason": reason, **more})


def not_started(folder: Path, reason: str | None = None) -> None:
    """Record the end of a run that has not begun: stopped, or failed with a reason."""
    status = RunStatus.STOPPED if reason is None else RunStatus.FAILED
    text = reason or "Stopped before training began."
    note_end(folder, status, text, instead_of=(RunStatus.PENDING,))


def last_step(folder: Path) -> int:
    """Return the last step in run.json; 0 if it cannot be read."""
    with contextlib.suppress(RunError):
        return int(read_run(folder).run_json.get("step", 0))
    return 0
