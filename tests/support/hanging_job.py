"""A real torchrun job of tests/scripts/hanging.py, watched, in which rank 1 hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepscope.distributed.hangs.cases import Hang
from stepscope.distributed.hangs.diagnose import hang_of
from stepscope.run import RunError, RunInfo, read_run, run_folders

ROOT = Path(__file__).resolve().parents[2]
STARTS_S = 120.0
"""Longest time from the start to a hang: a loaded machine takes half a minute to import torch."""
NAMED_S = 15.0
"""Longest time from the last step to the name of the rank."""


@dataclass(slots=True)
class Job:
    """The job under way: its runs' folder and torchrun's process."""

    runs: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def run(self) -> RunInfo | None:
        """The run as it stands now; None before it has begun."""
        try:
            folder = next(run_folders(self.runs), None)
            return None if folder is None else read_run(folder)
        except RunError:
            return None

    def hang(self) -> Hang:
        """Wait until the hang is named; fail where that takes longer than NAMED_S."""
        until = time.monotonic() + STARTS_S
        while time.monotonic() < until:
            run = self.run
            found = None if run is None else hang_of(run)
            if found is not None:
                assert time.time() - found.since < NAMED_S + 1, found.text
                return found
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.2)
        raise AssertionError(f"no hang was named: {self.log.read_text()[-3000:]}")


@contextmanager
def hanging(
    what: str, folder: Path, *, ranks: int = 2, backend: str = "gloo", **environ: str
) -> Iterator[Job]:
    """Run the job until the end of the block; nothing of it is left, stopped ranks included."""
    runs, log = folder / "runs", folder / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "stepscope.watch"]
    command += [str(ROOT / "tests/scripts/hanging.py"), what, backend]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STEPSCOPE_RUNS": str(runs), **environ}
    env.setdefault("OMP_NUM_THREADS", "1")
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        yield Job(runs, process, log)
    finally:
        ranks_left = psutil.Process(process.pid).children(True) if process.poll() is None else []
        for pid in [*(rank.pid for rank in ranks_left), process.pid]:
            _kill(pid)
        process.wait(20)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
