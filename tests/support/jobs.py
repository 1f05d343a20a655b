"""Jobs of several ranks under real torchrun, from their first steps on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from stepscope.distributed.hangs.cases import Hang, hang_of
from stepscope.host.child_process import kill_tree
from stepscope.run import read_run, run_folders
from stepscope.run.rank_info import find_rank
from stepscope.store import EventRow
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName
from tests.support.child_process import run_python
from tests.support.run_values import answer_to, events
from tests.support.server import ROOT, free_port
from tests.support.waiting import wait_for
from trainer.config import Strategy

SCRIPTS = ROOT / "tests" / "scripts"
NAMED_S = 15.0
"""Longest time from the last step of a job that hangs to the name of the rank."""
PATIENCE_S = 90.0
"""Longest time from the start to the first step: a busy machine imports torch in half a minute."""


class Job:
    """Ranks under torchrun, from their first steps on."""

    def __init__(
        self, folder: Path, ranks: int, process: subprocess.Popen[bytes], log: Path
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.process = process
        self.log = log

    def ask(self, name: CommandName, **args: Any) -> int:
        return send_command(self.folder, name, args)

    def events(self, rank: int) -> list[EventRow]:
        return [event for event in events(self.folder, rank) if event.kind in set(CommandName)]

    def answer(self, command_id: int, rank: int = 0) -> EventRow:
        return answer_to(self.folder, command_id, rank, PATIENCE_S)

    def answers(self, command_id: int) -> list[EventRow]:
        return [self.answer(command_id, rank) for rank in range(self.ranks)]

    def step(self, rank: int = 0) -> int:
        found = find_rank(self.folder, rank)
        return 0 if found is None else int(found.run_json["step"])

    def pid(self, rank: int) -> int:
        found = find_rank(self.folder, rank)
        assert found is not None
        return int(found.run_json["pid"])

    def statuses(self) -> list[str]:
        found = [find_rank(self.folder, rank) for rank in range(self.ranks)]
        return [rank.status.value for rank in found if rank is not None]


def job(
    root: Path, ranks: int, *planted: str, how: str = "ddp", restarts: int = 0
) -> AbstractContextManager[Job]:
    """A script that is watched."""
    watch = ["-m", "stepscope.watch", "--runs", str(root / "runs")]
    program = [*watch, str(SCRIPTS / "rank_steps.py"), str(10**6), how, *planted]
    return started(root, ranks, program, restarts)


def training(root: Path, parallel: Strategy) -> AbstractContextManager[Job]:
    """A training of ours on two ranks."""
    program = str(SCRIPTS / "rank_training.py")
    return started(root, 2, [program, str(root / "runs" / "ours"), parallel, "cpu"])


def diagnosed(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the findings of one kind that `stepscope diagnose` prints."""
    done = run_python("-m", "stepscope.cli", "diagnose", str(folder), "--json")
    return [finding for finding in json.loads(done.stdout) if finding["kind"] == kind]


@contextmanager
def started(
    root: Path, ranks: int, program: list[str], restarts: int = 0, **environ: str
) -> Iterator[Job]:
    """Run a program under torchrun; what a failed block leaves in the log is printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    torchrun += [f"--max-restarts={restarts}"]
    runs, log = root / "runs", root / "torchrun.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*torchrun, f"--master-port={free_port()}", *program],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def folder() -> Path | None:
        assert process.poll() is None, "torchrun has ended before the run began"
        return next(iter(run_folders(runs)), None)

    try:
        made = Job(wait_for(folder, PATIENCE_S), ranks, process, log)
        wait_for(lambda: min(map(made.step, range(ranks))) > 0, PATIENCE_S)
        yield made
    except BaseException:
        sys.stdout.write(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()


def named_hang(job: Job) -> Hang:
    """Wait until the hang is named; fail where that takes longer than NAMED_S."""
    found: Hang = wait_for(lambda: hang_of(read_run(job.folder)), PATIENCE_S)
    assert time.time() - found.since < NAMED_S + 1, found.text
    return found


def hanging(
    what: str, folder: Path, *, ranks: int = 2, backend: str = "gloo", **environ: str
) -> AbstractContextManager[Job]:
    """Run tests/scripts/hanging.py, watched, in which rank 1 hangs, until the end of the block."""
    watch = ["-m", "stepscope.watch", "--runs", str(folder / "runs")]
    return started(folder, ranks, [*watch, str(SCRIPTS / "hanging.py"), what, backend], **environ)
