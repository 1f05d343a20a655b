"""A run in a background thread of this process: the default."""

from __future__ import annotations

import importlib
import logging
import threading
from pathlib import Path

from stepscope.recorder.recorder import Recorder
from stepscope.run import RunStatus
from trainer.config import RunConfig
from trainer.runners.process import interrupted_by_shutdown, not_started

log = logging.getLogger(__name__)


class ThreadRun:
    """A run in a background thread of this process."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self._config = config
        self._stop = threading.Event()
        self._recorder: Recorder | None = None
        self._thread = threading.Thread(target=self._train, name="stepscope-training", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def goes_on(self) -> bool:
        return False

    def stop(self, timeout_s: float) -> bool:
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end_with_server(self) -> None:
        if self._recorder is None:
            not_started(self.folder)
        else:
            self._recorder.close(RunStatus.STOPPED, interrupted_by_shutdown(self._recorder.step))

    def _train(self) -> None:
        try:
            training = importlib.import_module("trainer.training.train")  # imports torch
            if self._stop.is_set():
                not_started(self.folder)
            else:
                training.run(self._config, self.folder, stop=self._stop, opened=self._opened)
        except Exception as error:
            log.exception("training thread ended")
            not_started(self.folder, f"Training could not start: {error}")

    def _opened(self, recorder: Recorder) -> None:
        self._recorder = recorder
