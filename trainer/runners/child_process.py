"""Child processes of the page: runs, memory probes and lessons."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from stepscope.common.files import open_for_append, read_tail
from stepscope.distributed import ONE_MACHINE
from stepscope.host.child_process import (
    Child,
    ChildOutput,
    ChildProcess,
    ChildState,
    kill_group,
    kill_tree,
    signal_all,
)
from stepscope.host.environment import granted_cores
from stepscope.run import RunError, RunKind, RunStatus, read_run, write_run_json
from stepscope.run.rank_info import rank_numbers
from stepscope.session.stop import rank_processes
from stepscope.store.recorder import first_run_json
from stepscope.store.writer import note_end
from trainer.config import RunConfig
from trainer.lessons import Lesson

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 300.0  # torch.compile can take minutes
SEARCH_LIMIT_S = 1800.0
PROJECT = Path(__file__).resolve().parents[2]
WORKER_LOG = "worker.log"  # output of the training process, or of torchrun
LOG_BYTES = 200_000  # end of an output that is searched for an error
SHUT_DOWN = "The server was shut down while the run was busy; an unfinished checkpoint is lost"


class MemoryProbeRun(Child):
    """A memory probe of a configuration in a child process. Thread-safe. Raises OSError.

    With `search` it is a process that finds the maximum batch size by such probes. A probe trains
    for at least `seconds` after its first step, for the throughput.
    """

    def __init__(self, config: RunConfig, *, search: bool = False, seconds: float = 0.0) -> None:
        self.config = config
        self.search = search
        self._last: dict[str, Any] = {"progress": "Starting a process"}
        self._folder = tempfile.TemporaryDirectory(
            prefix="stepscope-probe-", ignore_cleanup_errors=True
        )
        job = {
            "config": config.to_dict(),
            "search": search,
            "seconds": seconds,
            "folder": self._folder.name,
        }
        self._log = Path(self._folder.name) / "probe.log"
        with open(self._log, "wb") as errors:
            super().__init__(
                [sys.executable, "-m", "trainer.memory_estimate"],
                limit_s=SEARCH_LIMIT_S if search else PROBE_LIMIT_S,
                stderr=errors,
                first_line=json.dumps(job).encode() + b"\n",
                # A probe that runs out of memory is a result, not an alert.
                env=os.environ | {"STEPSCOPE_ALERTS": "off"},
                cwd=PROJECT,
            )

    def _now(self) -> ChildOutput:
        text = str(self._last.get("progress", ""))[:200]
        share = min(1.0, max(0.0, float(self._last.get("share") or 0.0)))
        return ChildOutput(ChildState.RUNNING, self.seconds, text, share)

    def _take(self, content: dict[str, Any]) -> None:
        self._last = content

    def _result(self, code: int) -> ChildOutput:
        printed = log_text(self._log)
        self._folder.cleanup()
        answer = self._last.get("answer")
        if isinstance(answer, dict):
            return ChildOutput(ChildState.FINISHED, self.seconds, answer=answer)
        if self._stopping:
            return ChildOutput(ChildState.STOPPED, self.seconds)
        return ChildOutput(ChildState.FAILED, self.seconds, reason=self._reason(code, printed))

    def _reason(self, code: int, printed: str) -> str:
        """Return why the process ended without an answer."""
        if self._late:
            return f"It took longer than {self._limit_s:.0f} s and was ended."
        if code == -signal.SIGKILL:
            return "Its process was killed, usually because the host ran out of memory."
        if "reason" in self._last:
            return str(self._last["reason"])
        last = " ".join(printed.strip().splitlines()[-1:])
        return f"Its process ended with exit code {code}. {last[:300]}".strip()


class LessonRun(Child):
    """A run of a lesson. Thread-safe. Raises OSError if the process cannot be started."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self._text = b""
        # Kineto would log between the lesson's lines, torchrun that it sets the threads.
        env = {"KINETO_LOG_LEVEL": "6"} | ({"OMP_NUM_THREADS": "1"} if lesson.ranks > 1 else {})
        env |= os.environ | {"PYTHONIOENCODING": "utf-8"}
        # "-u" is not for ranks: their lines would mix.
        command = [sys.executable, "-u", *lesson.arguments]
        super().__init__(
            command, limit_s=lesson.limit_s, env=env, stderr=subprocess.STDOUT, cwd=PROJECT
        )

    def _now(self) -> ChildOutput:
        return self._output(ChildState.RUNNING)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while chunk := stream.read(8192):
                self._text += chunk

    def _result(self, code: int) -> ChildOutput:
        if self._stopping:
            return self._output(ChildState.STOPPED)
        reason = None
        if self._late:
            reason = f"It was ended after {self.lesson.limit_s:.0f} s, its time limit."
        elif code != 0:
            reason = f"It ended with exit code {code}."
        return self._output(ChildState.FINISHED if reason is None else ChildState.FAILED, reason)

    def _output(self, state: ChildState, reason: str | None = None) -> ChildOutput:
        text = self._text.decode(errors="replace")
        return ChildOutput(state, self.seconds, text, reason=reason)


class ChildRun(ChildProcess):
    """A run in a child process that writes its output to worker.log. Methods: see ThreadRun."""

    def __init__(self, folder: Path, arguments: Sequence[str], **options: Any) -> None:
        self.folder = folder.resolve()
        command = [sys.executable, *arguments]
        with open(open_for_append(folder / WORKER_LOG, truncate=True), "wb") as log_file:
            super().__init__(
                command, stdout=log_file, stderr=subprocess.STDOUT, cwd=PROJECT, **options
            )
        self._waiter.start()

    def alive(self) -> bool:
        return self._waiter.is_alive()

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
        kill_group(self._process.pid)

    def _wait(self) -> None:
        self._note_end(self._process.wait())
        if self._process.stdin is not None:
            # Last: to ranks that still run, a closed stdin is the end of the server.
            self._process.stdin.close()

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


def write_pending(folder: Path, config: RunConfig, reason: str) -> None:
    """Write the run.json that is valid until the recorder of the run writes its own."""
    first = first_run_json(config.workload, RunKind.TRAINER, config.to_dict(), rank=0)
    now = time.time()  # the clock of this long-lived process may differ by now
    write_run_json(folder, first | {"created": now, "heartbeat": now, "reason": reason})


def not_started(folder: Path, reason: str | None = None) -> None:
    """Record the end of a run that has not begun: stopped, or failed with a reason."""
    status = RunStatus.STOPPED if reason is None else RunStatus.FAILED
    text = reason or "Stopped before training began."
    note_end(folder, status, text, instead_of=(RunStatus.PENDING,))


def log_text(path: Path) -> str:
    """Return the end of an output; empty if it cannot be read."""
    try:
        return read_tail(path, LOG_BYTES)
    except OSError:
        return ""


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
