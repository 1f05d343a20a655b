"""Jobs of several ranks under real torchrun, from their first steps on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from stepscope.run import run_folders
from stepscope.run.rank_info import find_rank
from stepscope.store import EventRow, StoreError, StoreReader
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName
from tests.support.server import free_port
from trainer.config import Strategy

SCRIPTS = Path(__file__).parents[1] / "scripts"
PATIENCE_S = 60.0


class Job:
    """Ranks under torchrun, from their first steps on."""

    def __init__(self, folder: Path, ranks: int, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.process = process

    def ask(self, name: CommandName, **args: Any) -> int:
        return send_command(self.folder, name, args)

    def events(self, rank: int) -> list[EventRow]:
        with StoreReader(self.folder, rank) as reader:
            return [event for event in reader.events(0, 10_000) if event.kind in set(CommandName)]

    def answer(self, command_id: int, rank: int = 0) -> EventRow:
        def found() -> EventRow | None:
            events = self.events(rank)
            return next((e for e in events if e.data.get("command_id") == command_id), None)

        return until(found, f"no answer of rank {rank} to {command_id}")

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


def until(look: Callable[[], Any], failure: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            found = look()
        except (StoreError, StopIteration, OSError):
            found = None
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(failure)


def job(
    root: Path, ranks: int, *planted: str, how: str = "ddp", steps: int = 10**6, restarts: int = 0
) -> AbstractContextManager[Job]:
    """A script that is watched, or records itself (`init`)."""
    watch = [] if how == "init" else ["-m", "stepscope.watch", "--runs", str(root / "runs")]
    program = [*watch, str(SCRIPTS / "rank_steps.py"), str(steps), how, *planted]
    return started(root, ranks, program, restarts)


def training(root: Path, parallel: Strategy) -> AbstractContextManager[Job]:
    """A training of ours on two ranks."""
    program = str(SCRIPTS / "rank_training.py")
    return started(root, 2, [program, str(root / "runs" / "ours"), parallel, "cpu"])


@contextmanager
def started(root: Path, ranks: int, program: list[str], restarts: int = 0) -> Iterator[Job]:
    """Run a program under torchrun; what a failed block leaves in the log is printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    torchrun += [f"--max-restarts={restarts}"]
    runs, log = root / "runs", root / "torchrun.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*torchrun, f"--master-port={free_port()}", *program],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1])},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def folder() -> Path | None:
        assert process.poll() is None, "torchrun has ended before the run began"
        return next(iter(run_folders(runs)), None)

    try:
        made = Job(until(folder, "no run folder"), ranks, process)
        until(lambda: min(map(made.step, range(ranks))) > 0, "no first step")
        yield made
    except BaseException:
        sys.stdout.write(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        process.kill()
        for left in run_folders(runs):
            for rank in range(ranks):
                found = find_rank(left, rank)
                if found is not None and found.status.live:
                    with suppress(ProcessLookupError):
                        os.kill(int(found.run_json["pid"]), signal.SIGKILL)
        process.wait()
