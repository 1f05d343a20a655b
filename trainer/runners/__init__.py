"""Where a run's loop lives: a thread of this process, a child process, or the ranks of a job.

They write the same run folder and take the same commands from it, so no reader can tell them
apart. torch is imported inside the thread or the child: the page starts without waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stepscope.recorder.recovery import note_end
from stepscope.run import RunStatus, new_run_folder, process_identity, write_run_json
from trainer.config import RunConfig, Runner
from trainer.runners.process import ProcessRun
from trainer.runners.thread import ThreadRun
from trainer.runners.torchrun import TorchrunRun


class RunHandle(Protocol):
    """A run that this process started."""

    @property
    def folder(self) -> Path:
        """Where it records now; a job that torchrun starts again records into another folder."""

    def alive(self) -> bool:
        """Return True until the run has written its last row."""

    def goes_on(self) -> bool:
        """Return True for a run that has ended here and is about to begin in another folder."""

    def stop(self, timeout_s: float) -> bool:
        """End the run at its next step boundary; return False if it took longer."""

    def end_with_server(self) -> None:
        """Note the end of a run that did not stop in time: this process is about to end."""


_KINDS: dict[Runner, Callable[[RunConfig, Path], RunHandle]] = {
    Runner.THREAD: ThreadRun,
    Runner.PROCESS: ProcessRun,
    Runner.TORCHRUN: TorchrunRun,
}


def start(config: RunConfig, root: Path) -> RunHandle:
    """Create a run folder under `root` and start training into it.

    Raises OSError where the folder cannot be made or the child not started. What goes wrong later
    is the status of the run.
    """
    folder = new_run_folder(root, config.workload)
    write_pending(folder, config)
    try:
        return _KINDS[config.runner](config, folder)
    except (OSError, RuntimeError) as error:  # too many processes or threads, no memory for one
        # The run would count as live for as long as this process: run.json names it.
        note_end(folder, RunStatus.FAILED, f"Training could not start: {error}.")
        raise OSError(str(error)) from error


def write_pending(folder: Path, config: RunConfig) -> None:
    """Write the run.json that stands until the loop's recorder writes its own."""
    now = time.time()
    where = {
        Runner.THREAD: "the training thread",
        Runner.PROCESS: "a training process",
        Runner.TORCHRUN: f"{config.devices_per_node} ranks with torchrun",
    }[config.runner]
    write_run_json(
        folder,
        {
            "schema": 1,
            "name": config.workload,
            "created": now,
            "status": RunStatus.PENDING,
            "reason": f"Starting {where}: loading PyTorch takes a few seconds the first time.",
            "heartbeat": now,
            "problem": None,
            "config": config.to_dict(),
            **process_identity(),
        },
    )
