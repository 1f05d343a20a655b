"""Starts a run in a thread of this process, in a child process, or as the ranks of torchrun.

All three write the same run folder and receive commands through it. Only the thread or the child
imports torch, so that the dashboard starts without it.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from stepscope.run import RunStatus, new_run_folder
from stepscope.store.recorder import Recorder
from stepscope.store.writer import note_end
from trainer.config import RunConfig, Runner
from trainer.runners.child_process import (
    SHUT_DOWN,
    ProcessRun,
    TorchrunRun,
    not_started,
    write_pending,
)

log = logging.getLogger(__name__)


class ThreadRun:
    """A run in a background thread of this process, the default."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self._config = config
        self._stop = threading.Event()
        self._recorder: Recorder | None = None
        self._thread = threading.Thread(target=self._train, name="stepscope-training", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Return True until the run has written its last row."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Stop the run at its next step boundary; return False after a timeout."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end_with_server(self) -> None:
        """Record the end of a run that `stop` did not stop, as this process ends."""
        if self._recorder is None:
            not_started(self.folder)
        else:
            self._recorder.close(RunStatus.STOPPED, f"{SHUT_DOWN}.")

    def _train(self) -> None:
        try:
            training = importlib.import_module("trainer.runners.training_run")  # imports torch
            if self._stop.is_set():
                not_started(self.folder)
            else:
                training.run(self._config, self.folder, stop=self._stop, opened=self._opened)
        except Exception as error:
            log.exception("training thread ended")
            not_started(self.folder, f"Training could not start: {error}")

    def _opened(self, recorder: Recorder) -> None:
        self._recorder = recorder


RunHandle = ThreadRun | ProcessRun | TorchrunRun
"""A run started by this process."""


def start(config: RunConfig, root: Path) -> RunHandle:
    """Create a run folder under `root` and start training into it. Raises OSError."""
    kinds: dict[Runner, Callable[[RunConfig, Path], RunHandle]] = {
        Runner.THREAD: ThreadRun,
        Runner.PROCESS: ProcessRun,
        Runner.TORCHRUN: TorchrunRun,
    }
    folder = new_run_folder(root, config.workload)
    write_pending(folder, config, "Starting: loading PyTorch takes a few seconds the first time.")
    try:
        return kinds[config.runner](config, folder)
    except (OSError, RuntimeError) as error:  # too many processes or threads, or no memory
        # run.json names this process: without an end the run would count as live.
        note_end(folder, RunStatus.FAILED, f"Training could not start: {error}.")
        raise OSError(str(error)) from error
