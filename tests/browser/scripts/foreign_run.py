"""A run that another process writes, by the Recorder alone: what a watched script looks like.

    python foreign_run.py FOLDER [FACTS as JSON]

It steps until Stop, serves the commands that it offers, and shows a second optimizer and a metric
of its own some steps later.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from stepscope.run import RunKind, RunStatus
from stepscope.store.recorder import Command, CommandName, Recorder

COMMANDS = [
    CommandName.PAUSE,
    CommandName.RESUME,
    CommandName.STOP,
    CommandName.MARK,
    CommandName.COLLECT_GARBAGE,
    CommandName.EMPTY_CACHE,
    CommandName.RESET_PEAKS,
]
LATE = 240
"""The step from which there is more to see: 12 s, enough to open the page before."""


def row(step: int) -> dict[str, float]:
    """Return what one step records."""
    values = {
        "train/loss": 2 * math.exp(-step / 80) + 0.05 * math.sin(step),
        "train/lr": 1e-3 * (1 - step / 1000),
        "train/grad_norm": 1 + 0.2 * math.cos(step),
        "perf/step_time": 0.02,
        "perf/data_wait": 0.004,
        "perf/samples_per_sec": 3200.0,
        "train/accuracy": 1 - math.exp(-step / 60),
    }
    if step > LATE:
        values |= {
            "train/loss.optimizer1": 1.5 * math.exp(-step / 120),
            "train/lr.optimizer1": 4e-4,
            "train/d_real": 0.5 + 0.1 * math.sin(step / 9),
        }
    return values


def answer(recorder: Recorder, command: Command) -> bool:
    """Serve a command; return False for Stop."""
    if command.name is CommandName.PAUSE:
        recorder.set_status(RunStatus.PAUSED)
    elif command.name is CommandName.RESUME:
        recorder.set_status(RunStatus.RUNNING)
    recorder.finish(
        command, command.args.get("text") or command.name.replace("_", " ").capitalize()
    )
    return command.name is not CommandName.STOP


def main(folder: Path, run_json: dict[str, object]) -> None:
    """Record until Stop."""
    folder.mkdir(parents=True)
    (folder / "output.log").write_text(
        "epoch 1\repoch 1: 10 %\repoch 1: 100 %\n\x1b[32mdone\x1b[0m\n"
    )
    recorder = Recorder(folder, name="train", kind=RunKind.WATCH)
    recorder.describe(
        commands=COMMANDS,
        optimizers=["Adam"],
        device="cpu",
        script={"path": "/home/me/gan/train.py", "arguments": ["--lr", "0.001"], "cwd": "/home/me"},
    )
    recorder.describe(**run_json)
    recorder.set_status(RunStatus.RUNNING)
    step = 0
    while True:
        step += 1
        recorder.log(step, row(step))
        recorder.sample(
            {
                "process/rss": 3e8 + 1e5 * step,
                "process/peak_rss": 3e8 + 1e5 * step,
                "host/mem_used": 4e9,
                "host/mem_total": 8e9,
                "process/cpu": 95.0,
                "host/cpu": 50.0,
            }
        )
        if step == LATE:
            recorder.describe(optimizers=["Adam", "SGD"])
        recorder.commands.wait(0.05)
        while (command := recorder.commands.take()) is not None:
            if not answer(recorder, command):
                recorder.close(RunStatus.STOPPED, "Stopped from the page.")
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
