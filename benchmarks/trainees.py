"""The training processes of `overhead.py`: one a way to train, each training when told to."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.child import ChildError
from benchmarks.pairs import AGAIN, BARE
from benchmarks.peers.adapters import OURS
from benchmarks.peers.environment import ROOT, environment, last_line
from benchmarks.report import say
from stepscope.common.metrics import Stream
from stepscope.store import StoreReader

WATCH = "watch"
SCRIPT = ROOT / "benchmarks" / "overhead_script.py"
ANSWER_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Where the process trains whose turn it is, and where the others wait."""

    training: Sequence[int]
    waiting: Sequence[int]


class Trainee:
    """One training process, which trains when told to. Raises ChildError."""

    def __init__(
        self, python: Path, way: str, folder: Path, width: int = 0, device: str = "cpu"
    ) -> None:
        self.trained = 0
        self._way = way
        self._folder = folder
        (folder / "data").mkdir(parents=True)
        results = folder / "results"
        os.mkfifo(results)
        # For reading and writing, so that opening it waits for nobody.
        self._results = os.open(results, os.O_RDWR)
        recorder = BARE if way in (AGAIN, WATCH) else way
        script = [str(SCRIPT), recorder, str(folder / "data"), str(width), str(results), device]
        runner = ["-m", "stepscope.watch", "--runs", str(folder / "data")] if way == WATCH else []
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), *runner, *script],
                cwd=folder,
                env=environment(folder)
                | ({} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": "0"}),
                text=True,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        self._training = self._process.pid

    def started(self) -> None:
        """Wait until it is ready to train."""
        self._training = int(self.answer()[0])

    def train(self, steps: int) -> list[float]:
        """Let it train; return seconds and CPU seconds."""
        assert self._process.stdin is not None
        self.trained += steps
        try:
            print(steps, file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise ChildError(self._said()) from error
        return self.answer()

    def answer(self) -> list[float]:
        """Return the next line of numbers that it writes."""
        deadline, text = time.monotonic() + ANSWER_TIMEOUT_S, b""
        while not text.endswith(b"\n"):
            if select.select([self._results], [], [], 0.5)[0]:
                text += os.read(self._results, 100)
            elif self._process.poll() is not None or time.monotonic() > deadline:
                raise ChildError(self._said())
        return [float(number) for number in text.split()]

    def place(self, cores: Collection[int]) -> None:
        """Move all its threads, and those of its children, to these cores."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._training)
            for one in (process, *process.children(recursive=True)):
                for thread in one.threads():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, cores)

    def close(self) -> None:
        """End it, by force if it does not end by itself; a second call does nothing."""
        if self._results < 0:
            return
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        os.close(self._results)
        self._results = -1

    def recorded(self) -> int:
        """Return the steps that Stepscope has recorded of it."""
        (run,) = [path.parent for path in self._folder.glob("data/*/run.json")]
        with StoreReader(run) as reader:
            return sum(info.rows for info in reader.series() if info.stream == Stream.STEPS)

    def _said(self) -> str:
        return last_line((self._folder / "output").read_text(errors="replace"))


@contextmanager
def trainees(
    python: Path, ways: Sequence[str], width: int, device: str, failed: dict[str, str]
) -> Iterator[dict[str, Trainee]]:
    """Start one process a way, all at once; those that fail are noted in `failed`."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as closing:
        started = {way: Trainee(python, way, Path(name) / way, width, device) for way in ways}
        for trainee in started.values():
            closing.callback(trainee.close)
        for way, trainee in list(started.items()):
            try:
                trainee.started()
            except ChildError as error:
                say(f"{way} failed: {error}")
                failed[way] = str(error)
                del started[way]
        if BARE not in started or AGAIN not in started:
            raise SystemExit(f"The bare loop did not start: {failed}")
        yield started
        for trainee in started.values():
            trainee.close()
        for way in {OURS, WATCH} & set(started):
            rows, steps = started[way].recorded(), started[way].trained
            if rows < steps:
                failed[way] = f"recorded {rows} of {steps} steps"


def take_turns(
    running: dict[str, Trainee], blocks: Sequence[str], steps: int, cores: Cores
) -> list[tuple[str, list[float]]]:
    """Train block after block, one process at a time; return each one's way, seconds and CPU."""
    for trainee in running.values():
        trainee.place(cores.waiting)
    taken = []
    for way in blocks:
        running[way].place(cores.training)
        running[way].train(max(1, steps // 4))  # its memory is no longer in the caches
        taken.append((way, running[way].train(steps)))
        running[way].place(cores.waiting)
    return taken
