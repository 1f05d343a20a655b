"""The buttons that only the built-in trainer answers: a checkpoint, and a stop at a boundary."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stepscope.formatting import format_bytes
from stepscope.recording.recorder import Command, CommandName, Recorder
from stepscope.sampling.allocator import Readings
from stepscope.session.commands import CommandServer
from trainer.training.checkpoint import write_checkpoint
from trainer.training.state import Training


class RunStopped(Exception):
    """The run was asked to stop."""


class Commands(CommandServer):
    """Answers commands for one run; made and called by the training thread."""

    def __init__(
        self,
        recorder: Recorder,
        training: Training,
        *,
        stop: threading.Event,
        readings: Readings,
        reset_process_peak: Callable[[], tuple[float, float]],
    ) -> None:
        super().__init__(
            recorder,
            training.compute,
            readings=readings,
            reset_process_peak=reset_process_peak,
            own={
                CommandName.STOP: self._stop_run,
                CommandName.SAVE_CHECKPOINT: self._save_checkpoint,
            },
            while_paused=self._end_with_server,
        )
        self._training = training
        self._stop = stop

    def serve(self, flush: Callable[[], None]) -> float:
        """Serve what was asked since the last boundary; return the seconds it took.

        `flush` logs the steps still under way, so that a marker stands after them. Stays here
        while the run is paused. Raises RunStopped.
        """
        seconds = super().serve(flush)
        if self._stop.is_set():
            flush()
            self._end_with_server()
        return seconds

    def _end_with_server(self) -> None:
        if self._stop.is_set():
            raise RunStopped("The server was shut down.")

    def _stop_run(self, command: Command) -> None:
        self._recorder.finish(command, f"Stop: after step {self._training.step}")
        raise RunStopped("Stopped from the page.")

    def _save_checkpoint(self, command: Command) -> None:
        path = self._recorder.folder / f"step-{self._training.step}.pt"
        try:
            size = write_checkpoint(path, self._training.state_dict())
        except OSError as error:
            text = f"Save checkpoint: failed ({error}). Training goes on; free disk space"
            self._recorder.finish(command, text, ok=False)
            return
        text = f"Save checkpoint: {path.name}, {format_bytes(size)}"
        self._recorder.finish(command, text, path=path.name, bytes=size)
