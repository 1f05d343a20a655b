"""Command handlers of a run: Stop and Save checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from stepscope.common.formatting import format_bytes
from stepscope.session.command_server import CommandHandler, CommandServer
from stepscope.session.sampler import Sampler
from stepscope.session.session import Session
from stepscope.store.recorder import Command, CommandName, Recorder
from trainer.training.state import TrainState, save


class RunStoppedError(Exception):
    """The run received a Stop command, or its server is shutting down."""


class TrainerCommands:
    """Command handlers of a run for its `CommandServer`; called by the training thread."""

    def __init__(
        self,
        recorder: Recorder,
        training: TrainState,
        stop: threading.Event,
        at_boundary: Callable[[TrainState], None],
    ) -> None:
        self._recorder = recorder
        self._training = training
        self._stop = stop
        self._at_boundary = at_boundary
        self.handlers: Mapping[CommandName, CommandHandler] = {
            CommandName.STOP: self._stop_run,
            CommandName.SAVE_CHECKPOINT: self._save_checkpoint,
        }

    def serve(self, session: Session, sampler: Sampler) -> CommandServer:
        """Return the server of these commands, which the caller closes."""
        return session.answer(
            sampler, self.handlers, check=self.check, step=session.oom.step, closed_here=True
        )

    def check(self) -> None:
        self._at_boundary(self._training)
        if self._stop.is_set():
            raise RunStoppedError("The server was shut down, or its process received a signal.")

    def _stop_run(self, command: Command) -> None:
        self._recorder.finish(command, f"Stop: after step {self._training.step}")
        raise RunStoppedError(str(command.args.get("reason") or "Stopped from the page."))

    def _save_checkpoint(self, command: Command) -> None:
        path = self._recorder.folder / f"step-{self._training.step}.pt"
        try:
            size = save(path, self._training)
        except OSError as error:
            text = f"Save checkpoint: failed ({error}). Training continues; free disk space"
            self._recorder.finish(command, text, ok=False)
            return
        text = f"Save checkpoint: {path.name}"
        if size is not None:  # rank 0
            text += f", {format_bytes(size)}"
        self._recorder.finish(command, text, path=path.name, bytes=size)
