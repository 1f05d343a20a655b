"""Where a run's loop lives: a thread of this process or a child process, behind one interface.

Both write the same run folder and take the same commands from it, so no reader can tell them
apart. torch is imported inside the thread or the child: the page starts without waiting for it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from stepscope.recording.recovery import note_end
from stepscope.run import RunStatus, new_run_folder, process_identity, write_run_json
from trainer.config import RunConfig, Runner
from trainer.runners.process import ProcessRun
from trainer.runners.thread import ThreadRun


class ActiveRun(Protocol):
    """A run that this process started."""

    folder: Path

    def alive(self) -> bool:
        """Return True until the run has written its last row."""

    def stop(self, timeout_s: float) -> bool:
        """End the run at its next step boundary; return False if it took longer."""

    def end_with_server(self) -> None:
        """Note the end of a run that did not stop in time: this process is about to end."""


def start(config: RunConfig, root: Path) -> ActiveRun:
    """Create a run folder under `root` and start training into it.

    Raises OSError where the folder cannot be made or the child not started. What goes wrong later
    is the status of the run.
    """
    folder = new_run_folder(root, config.workload)
    _write_pending(folder, config)
    try:
        in_thread = config.runner is Runner.THREAD
        return ThreadRun(config, folder) if in_thread else ProcessRun(config, folder)
    except (OSError, RuntimeError) as error:  # too many processes or threads, no memory for one
        # The run would count as live for as long as this process: run.json names it.
        note_end(folder, RunStatus.FAILED, f"Training could not start: {error}.")
        raise OSError(str(error)) from error


def _write_pending(folder: Path, config: RunConfig) -> None:
    """Write the run.json that stands until the loop's recorder writes its own."""
    now = time.time()
    where = "the training thread" if config.runner is Runner.THREAD else "a training process"
    write_run_json(
        folder,
        {
            "schema": 1,
            "name": config.workload,
            "created": now,
            "status": RunStatus.PENDING,
            "reason": f"Starting {where}: the first time PyTorch takes some seconds to load.",
            "heartbeat": now,
            "problem": None,
            "config": config.to_dict(),
            **process_identity(),
        },
    )
