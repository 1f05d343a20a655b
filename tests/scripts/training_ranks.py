"""One rank of a job that trains several configurations in turn: JOBS.json FOLDER.

Importing torch takes seconds, so tests put all they need from so many ranks into one launch. A job
may name a rank that fails at a step, as `fails: [rank, step]`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import trainer.training.run as training
from stepscope.run import RunStatus
from trainer.config import RunConfig
from trainer.training.commands import OwnCommands

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    training.leave = lambda: None  # type: ignore[assignment]  # the next job meets in this group
    jobs: dict[str, dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for name, job in jobs.items():
        plant(*job.get("fails", (-1, 0)))
        folder = Path(sys.argv[2]) / name
        folder.mkdir(exist_ok=True)
        status = training.run(RunConfig.from_dict(job["config"]), folder)
        sys.stdout.write(f"rank {RANK}, {name}: {status}\n")
        sys.stdout.flush()
        if status is not RunStatus.FINISHED:
            os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def plant(rank: int, step: int) -> None:
    """Let the training of this rank fail after a step, if it is the one."""

    def check(self: OwnCommands) -> None:
        if rank == RANK and self._training.step == step:
            raise ValueError("planted by the test")

    OwnCommands.check = check  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
