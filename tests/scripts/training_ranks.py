"""One rank of a job that trains several configurations in turn: JOBS.json FOLDER.

Importing torch takes seconds, so tests put all they need from so many ranks into one launch. A job
may name a rank that fails at a step, as `fails: [rank, step]`, a step after which it saves a
checkpoint as the button does, as `saves`, and the first loss scale of fp16, as `scale`. Without
torchrun it is one process.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer.runners.training_run as training
from stepscope.run import RunStatus
from trainer.config import RunConfig
from trainer.training.commands import TrainerCommands
from trainer.training.state import save

SCALER = torch.amp.GradScaler
RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    training.destroy_process_group = lambda: None  # type: ignore[assignment]  # the next job meets in this group
    jobs: dict[str, dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for name, job in jobs.items():
        plant(*job.get("fails", (-1, 0)), job.get("saves", 0))
        plant_scale(job.get("scale", 2.0**16))
        folder = Path(sys.argv[2]) / name
        folder.mkdir(exist_ok=True)
        status = training.run(RunConfig.from_dict(job["config"]), folder)
        sys.stdout.write(f"rank {RANK}, {name}: {status}\n")
        sys.stdout.flush()
        if status is not RunStatus.FINISHED:
            os._exit(1)
        if torch.cuda.is_initialized():
            peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
            (folder / f"peaks{RANK}.txt").write_text(json.dumps(peaks))
    if dist.is_initialized():
        dist.destroy_process_group()


def plant(rank: int, fails: int, saves: int) -> None:
    """Let the training of this rank fail after a step, if it is the one, and all save after one."""

    def check(self: TrainerCommands) -> None:
        if rank == RANK and self._training.step == fails:
            raise ValueError("planted by the test")
        if saves and self._training.step == saves:
            save(self._recorder.folder / f"step-{saves}.pt", self._training)

    TrainerCommands.check = check  # type: ignore[method-assign]


def plant_scale(scale: float) -> None:
    """Begin fp16 with this loss scale: a large one overflows in the first steps."""
    torch.amp.GradScaler = partial(SCALER, init_scale=scale)  # type: ignore[misc, assignment]


if __name__ == "__main__":
    main()
