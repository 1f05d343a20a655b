"""Serves the page's buttons at a step boundary: the only place where they touch a training.

All kinds of runs share it. What differs between them comes in as `Memory`, as handlers of their own
and as a check that may end the run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from stepscope.recording.recorder import Command, CommandName, Recorder
from stepscope.run import RunStatus
from stepscope.sampling.allocator import Readings
from stepscope.session.memory_commands import Handler, Memory, MemoryCommands

log = logging.getLogger(__name__)

PAUSED_POLL_S = 0.1  # how long a paused run may miss that it has to end
MARK_LENGTH = 200  # characters of a mark's text that are kept


class CommandServer:
    """Answers the commands of one run; called by the training thread.

    `own` holds the handlers that only this kind of run has, STOP among them. `check` is called at
    each boundary, and again and again while the run is paused: it may raise to end the run. A run
    without training has no `memory`, and answers MARK and `own` alone.
    """

    def __init__(
        self,
        recorder: Recorder,
        memory: Memory | None,
        *,
        readings: Readings,
        reset_process_peak: Callable[[], tuple[float, float]],
        own: Mapping[CommandName, Handler],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._memory = memory
        self._readings = readings
        self._check = check
        self._paused = False
        self._handlers: dict[CommandName, Handler] = {CommandName.MARK: self._mark, **own}
        self._of_memory: MemoryCommands | None = None
        if memory is not None:
            self._of_memory = MemoryCommands(recorder, memory, reset_process_peak)
            self._handlers |= self._of_memory.handlers
            self._handlers |= {CommandName.PAUSE: self._pause, CommandName.RESUME: self._resume}

    def supported_commands(self) -> list[CommandName]:
        """Return the commands that have an effect here, for run.json."""
        on_gpu = self._memory is not None and self._memory.on_gpu
        return [
            name
            for name in CommandName
            if name in self._handlers and (on_gpu or name is not CommandName.MEMORY_SNAPSHOT)
        ]

    def serve(self, flush: Callable[[], None]) -> float:
        """Serve what was asked since the last boundary; return the seconds the commands took.

        `flush` records the steps still under way, so that a marker stands after them. Stays here
        while the run is paused. Raises only what the handler of STOP and `check` raise.
        """
        if self._readings.wanted:
            self._readings.serve()
        asked = deque(self._recorder.take_commands())
        if not asked:
            self._check()
            return 0.0
        began = time.perf_counter()
        try:
            flush()
            while True:
                while asked:
                    self._serve_one(asked.popleft())
                self._check()
                if not self._paused:
                    return time.perf_counter() - began
                asked.extend(self._recorder.wait_command(PAUSED_POLL_S))
                if self._readings.wanted:
                    self._readings.serve()
        except BaseException:  # a stop, or Ctrl-C; the script may go on all the same
            self._leave_pause()
            self._recorder.put_back(asked)
            raise

    def wait(self, timeout_s: float) -> None:
        """Serve the commands that come within this time; for a run without steps."""
        for command in self._recorder.wait_command(timeout_s):
            self._serve_one(command)

    def close(self) -> None:
        """End what needs another step: none will come. A second call does nothing."""
        if self._of_memory is not None and self._of_memory.snapshot_command is not None:
            self._guarded(self._of_memory.end_snapshot, self._of_memory.snapshot_command)

    def _serve_one(self, command: Command) -> None:
        handler = self._handlers.get(command.name)
        if handler is None:
            text = f"{_label(command)}: this run does not answer it"
            self._recorder.finish(command, text, ok=False)
        elif command.name is CommandName.STOP:
            self._leave_pause()
            handler(command)
        else:
            self._guarded(handler, command)

    def _guarded(self, handler: Handler, command: Command) -> None:
        try:
            with self._readings.held():
                handler(command)
        except Exception as error:  # a button must not end a training
            log.warning("stepscope: %s failed", command.name, exc_info=True)
            text = f"{_label(command)}: failed ({type(error).__name__}: {error})"
            self._recorder.finish(command, text, ok=False)

    def _pause(self, command: Command) -> None:
        if self._paused:
            self._recorder.finish(command, "Pause: the run is paused already", ok=False)
            return
        self._paused = True
        self._recorder.set_status(RunStatus.PAUSED)
        self._recorder.finish(command, f"Pause: after step {self._recorder.step}")

    def _resume(self, command: Command) -> None:
        if not self._paused:
            self._recorder.finish(command, "Resume: the run is not paused", ok=False)
            return
        self._leave_pause()
        self._recorder.finish(command, "Resume")

    def _leave_pause(self) -> None:
        if self._paused:
            self._paused = False
            self._recorder.set_status(RunStatus.RUNNING)

    def _mark(self, command: Command) -> None:
        text = str(command.args.get("text", "")).strip()[:MARK_LENGTH] or "Mark"
        if self._memory is None:
            self._recorder.finish(command, text)
        else:
            self._recorder.finish(command, text, after=self._memory.memory())


def _label(command: Command) -> str:
    return command.name.replace("_", " ").capitalize()
