"""The process of a trial: started with a time limit and stopped on request, and its own program.

`python -m stepscope.lab.trial_process MODULE` calls `run_trial` of the module with the job, one
line of JSON on stdin, and writes the result, one line of JSON on stdout. The process ends with its
sweep: on Linux the kernel kills it, elsewhere a thread notices the end of stdin.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from stepscope.common.files import open_for_append, read_tail
from stepscope.common.formatting import format_duration, terminal_text
from stepscope.host.child_process import (
    Child,
    ChildOutput,
    ChildState,
    call_at_end_of,
    kill_own_group,
    kill_until_none,
    set_parent_death_signal,
)

LOG = "trial.log"
MAX_LOG_BYTES = 20_000  # Bytes at the end of the log that are searched for the last line.
RUN = "trial-"  # Prefix of a trial's run folder, which is removed after the trial.
TRIAL_FOLDER = "STEPSCOPE_TRIAL_FOLDER"
"""Environment variable of all processes of a trial: its run folder."""
KILL_TIMEOUT_S = 5.0


class TrialProcess:
    """Runs `run_trial` of a module, one trial at a time. A signal handler may call `stop`."""

    def __init__(self, module: str, folder: Path = Path()) -> None:
        self._module = module
        self.folder = folder
        self._trial: _Trial | None = None
        self.stopping = False

    def take(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run a trial in a new process; return its result or a `reason`, and its `seconds`.

        `stops` is set if the reason is the sweep's folder. If `stopping` is set, the result is
        invalid.
        """
        for former in self.folder.glob(f"{RUN}*/"):  # of a killed process
            shutil.rmtree(former, ignore_errors=True)
        run = Path(tempfile.mkdtemp(prefix=RUN, dir=self.folder)).resolve()
        temporary = tempfile.mkdtemp(prefix="trial-")  # short: a socket's path has 107 bytes
        began = time.monotonic()
        try:
            self._trial = _Trial(
                self._module,
                {**job, "folder": str(run), "temporary": temporary},
                self.folder / LOG,
                timeout_s,
            )
            try:
                if not self.stopping:  # set while the process was starting
                    self._trial.wait()
            finally:
                self._trial.stop()
            found = self._trial.output()
        finally:
            kill_until_none(partial(_started_by, str(run)), KILL_TIMEOUT_S)
            for folder in (run, temporary):
                shutil.rmtree(folder, ignore_errors=True)
        answer = found.answer or {"reason": found.reason}
        return {**answer, "seconds": time.monotonic() - began}

    def stop(self) -> None:
        """Kill the current trial; `take` returns then."""
        self.stopping = True
        if self._trial is not None:
            self._trial.stop(0)


class _Trial(Child):
    """One child process, whose stderr is the log."""

    def __init__(self, module: str, job: Mapping[str, Any], log: Path, timeout_s: float) -> None:
        self._answer: dict[str, Any] = {}
        self._log = log
        package = importlib.util.find_spec(module.partition(".")[0])
        assert package is not None
        assert package.origin is not None
        # The safe path (-P) has no current folder, from which this process may have its packages.
        paths = [str(Path(package.origin).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "STEPSCOPE_ALERTS": "off",  # a trial that fails is a result
            TRIAL_FOLDER: str(job["folder"]),
        }
        with open(open_for_append(log, truncate=True), "wb") as output:
            super().__init__(
                [sys.executable, "-P", "-m", "stepscope.lab.trial_process", module],
                limit_s=timeout_s,
                first_line=json.dumps(job).encode() + b"\n",
                env=environment,
                stderr=output,
                cwd=None,  # files of a custom workload may be relative to it
            )

    def _take(self, content: dict[str, Any]) -> None:
        self._answer = content

    def _result(self, code: int) -> ChildOutput:
        if self._answer and not self._late:
            return ChildOutput(ChildState.FINISHED, self.seconds, answer=self._answer)
        return ChildOutput(ChildState.FAILED, self.seconds, reason=self._why(code))

    def _why(self, code: int) -> str:
        """Return how a process without a result ended."""
        if self._late:
            return f"Timed out after {format_duration(self._limit_s)}."
        if code == -signal.SIGKILL:
            return (
                "The process was killed (SIGKILL), usually because host memory ran out. Use a "
                "smaller batch or model."
            )
        lines = terminal_text(read_tail(self._log, MAX_LOG_BYTES)).strip().splitlines()
        last = lines[-1][:300] if lines else ""
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"Its process ended {how}. {last}".strip()


def _started_by(run: str) -> set[psutil.Process]:
    """Return the processes of a trial by their environment: ranks lead sessions, or are orphans."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended, or of another user
            if process.environ().get(TRIAL_FOLDER) == run:
                found.add(process)
    return found


def main(module: str) -> None:
    set_parent_death_signal()
    # Output of the training must not mix with the result.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = json.loads(sys.stdin.readline())
    call_at_end_of(0, kill_own_group)
    # Imported here because importing torch takes seconds, in which the sweep may end.
    trial_run = importlib.import_module(module)
    gc.freeze()  # imported modules stay: no collection has to traverse them
    print(json.dumps(trial_run.run_trial(job)), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
