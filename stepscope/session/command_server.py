"""Execute the commands of the page at step boundaries, the only place where they take effect."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping

import psutil

from stepscope.common.formatting import format_bytes
from stepscope.memory import allocator
from stepscope.memory.snapshots.recording import SnapshotRecording, steps_refusal
from stepscope.profiling.profile_command import ProfileCommand
from stepscope.run import RunStatus, rank_file
from stepscope.session.sampler import Sampler
from stepscope.store.recorder import Command, CommandName, Recorder

log = logging.getLogger(__name__)

PAUSED_POLL_S = 0.1  # Interval of `check` during a pause.
MAX_MARK_CHARS = 200

CommandHandler = Callable[[Command], None]


class CommandServer:
    """Executes the commands of one run. Training thread only.

    `own` has the handlers of this kind of run, such as STOP. `check` is called at each boundary and
    during a pause; it may raise to end the run. `closed_here`: the training thread calls `close`.
    """

    def __init__(
        self,
        recorder: Recorder,
        sampler: Sampler,
        own: Mapping[CommandName, CommandHandler],
        *,
        check: Callable[[], None] = lambda: None,
        step: Callable[[], int] | None = None,
        closed_here: bool = False,
    ) -> None:
        self._recorder = recorder
        self._readings = sampler.readings
        self.read_if_requested = self._readings.read_if_requested
        self._reset_process_peak = sampler.host.reset_peak
        self._check = check
        self._paused = False
        self._serving = False
        self.snapshot: SnapshotRecording | None = None
        """The snapshot in progress. While there is one, each step boundary calls `serve`."""
        self.step = step or (lambda: recorder.step)
        self.profiling = ProfileCommand(
            recorder, step=self.step, on_gpu=lambda: self.on_gpu, ended_here=closed_here
        )
        self._handlers: dict[CommandName, CommandHandler] = {
            CommandName.PAUSE: self._pause,
            CommandName.RESUME: self._resume,
            CommandName.EMPTY_CACHE: self._empty_cache,
            CommandName.RESET_PEAKS: self._reset_peaks,
            CommandName.COLLECT_GARBAGE: self._collect_garbage,
            CommandName.MARK: self._mark,
            CommandName.MEMORY_SNAPSHOT: self._memory_snapshot,
            CommandName.PROFILE: self.profiling.ask,
            **own,
        }

    @property
    def on_gpu(self) -> bool:
        """True once training has begun on a CUDA device."""
        return self._readings.index is not None and allocator.reason() is None

    def read_memory(self) -> dict[str, float]:
        """Return the bytes in use by metric key: by torch's CUDA allocator, or by this process."""
        if self.on_gpu:
            return self._readings.read()
        return {"process/rss": float(psutil.Process().memory_info().rss)}

    @property
    def busy(self) -> bool:
        """True while a command, a pause or a profile delays the training. Thread-safe."""
        return self._serving or self._paused or self.profiling.active

    def supported_commands(self) -> list[CommandName]:
        """Return the commands that have an effect in this run, for run.json."""
        return [
            name
            for name in CommandName
            if name in self._handlers
            and (self.on_gpu or name is not CommandName.MEMORY_SNAPSHOT)
            and ("torch" in sys.modules or name is not CommandName.PROFILE)
        ]

    def serve(self, flush: Callable[[], None]) -> float:
        """Execute the commands since the last boundary; return their duration in seconds.

        `flush` records the pending steps before a marker. Returns after a pause, and after the
        ranks of a job have agreed. Raises only errors of the handler of STOP and of `check`.
        """
        self._recorder.activity += 1
        took_s = 0.0
        if self._readings.wanted:
            took_s += self._readings.serve()
        if self.profiling.active:
            with self._readings.then_read():
                took_s += self.profiling.reach()
        if self.snapshot is not None:
            took_s += self._reach_snapshot(self.snapshot)
        if self._recorder.commands.waiting:
            took_s += self._serve_waiting(flush)
        else:
            self._check()
        if self.profiling.active:
            self.profiling.leave()
        return took_s

    def _serve_waiting(self, flush: Callable[[], None]) -> float:
        """Execute the due commands, and wait for the end of a pause and for open decisions."""
        commands = self._recorder.commands
        began = time.perf_counter()
        self._serving = True
        try:
            while True:
                while (command := commands.take(paused=self._paused)) is not None:
                    flush()
                    self._serve_one(command)
                self._check()
                if not self._paused and commands.may_leave():
                    return time.perf_counter() - began
                commands.wait(PAUSED_POLL_S)
                if self._readings.wanted:
                    self._readings.serve()
        finally:
            self._leave_pause()  # after a stop, or Ctrl-C; the script may continue
            self._serving = False

    def close(self) -> None:
        """End a snapshot and a profile, which would need another step. May be called twice."""
        if self.snapshot is not None:
            self._end_snapshot(self.snapshot)
        if self.profiling.active:
            with self._readings.then_read():
                self.profiling.close()

    def _serve_one(self, command: Command) -> None:
        handler = self._handlers.get(command.name)
        if handler is None:
            self._refuse(command, "this run does not answer it")
        elif command.name is CommandName.STOP:
            self._leave_pause()
            handler(command)
        else:
            self._guarded(handler, command)

    def _guarded(self, handler: CommandHandler, command: Command) -> None:
        try:
            with self._readings.then_read():
                handler(command)
        except Exception as error:  # a button must not end a training
            log.warning("stepscope: %s failed", command.name, exc_info=True)
            self._refuse(command, f"failed ({type(error).__name__}: {error})")

    def _refuse(self, command: Command, text: str) -> None:
        self._recorder.finish(command, f"{command.label}: {text}", ok=False)

    def _pause(self, command: Command) -> None:
        if self._paused:
            self._refuse(command, "the run is paused already")
            return
        self._paused = True
        self.profiling.interrupt("the run was paused")
        self._recorder.set_status(RunStatus.PAUSED)
        self._recorder.finish(command, f"Pause: after step {self._recorder.step}")

    def _resume(self, command: Command) -> None:
        if self._paused:
            self._leave_pause()
            self._recorder.finish(command, "Resume")
        else:
            self._refuse(command, "the run is not paused")

    def _leave_pause(self) -> None:
        if self._paused:
            self._paused = False
            self._recorder.set_status(RunStatus.RUNNING)

    def _mark(self, command: Command) -> None:
        text = str(command.args.get("text", "")).strip()[:MAX_MARK_CHARS] or "Mark"
        self._recorder.finish(command, text, after=self.read_memory())

    def _empty_cache(self, command: Command) -> None:
        before = self.read_memory()
        if self.on_gpu:
            sys.modules["torch"].cuda.empty_cache()
        after = self.read_memory()
        if self.on_gpu:
            # torch counts cuBLAS workspaces as allocated, too: 32 MiB on an H100.
            allocated = format_bytes(after["memory/allocated"])
            text = f"reserved {_change(before, after, 'memory/reserved')}; "
            text += f"{allocated} in tensors and library workspaces"
        else:
            text = "a CPU run has no CUDA cache to empty; process memory "
            text += _change(before, after, "process/rss")
        self._recorder.finish(command, f"Empty cache: {text}", before=before, after=after)

    def _reset_peaks(self, command: Command) -> None:
        before = self.read_memory()
        if self.on_gpu:
            sys.modules["torch"].cuda.reset_peak_memory_stats(self._readings.index)
        after = self.read_memory()
        before["process/peak_rss"], after["process/peak_rss"] = self._reset_process_peak()
        if self.on_gpu:
            text = f"peak allocated {_change(before, after, 'memory/peak_allocated')}, "
            text += f"peak reserved {_change(before, after, 'memory/peak_reserved')}"
        else:
            text = f"peak process memory {_change(before, after, 'process/peak_rss')}"
        self._recorder.finish(command, f"Reset peak stats: {text}", before=before, after=after)

    def _collect_garbage(self, command: Command) -> None:
        before = self.read_memory()
        objects = gc.collect()
        after = self.read_memory()
        text = f"Collect garbage: {objects:,} objects freed; "
        if self.on_gpu:
            text += f"allocated {_change(before, after, 'memory/allocated')}"
        else:
            text += f"process memory {_change(before, after, 'process/rss')}"
        self._recorder.finish(command, text, before=before, after=after, objects=objects)

    def _memory_snapshot(self, command: Command) -> None:
        """Begin a recording at this boundary."""
        refused = steps_refusal(command)
        if not self.on_gpu:
            refused = "a CPU run has no CUDA allocator to take it of"
        elif self.snapshot is not None:
            refused = "another snapshot is in progress"
        if refused is not None:
            self._refuse(command, refused)
        else:
            self.snapshot = SnapshotRecording(command, self._recorder.step)
            self._recorder.request_boundary()

    def _reach_snapshot(self, snapshot: SnapshotRecording) -> float:
        """End the recording after its last step; return the seconds that takes."""
        if self._recorder.step >= snapshot.last_step:
            return self._end_snapshot(snapshot)
        snapshot.labels.begin_step()
        self._recorder.request_boundary()
        return 0.0

    def _end_snapshot(self, snapshot: SnapshotRecording) -> float:
        began = time.perf_counter()
        self.snapshot = None
        self._guarded(lambda command: self._write_snapshot(snapshot), snapshot.command)
        return time.perf_counter() - began

    def _write_snapshot(self, snapshot: SnapshotRecording) -> None:
        first, last = snapshot.after_step + 1, self._recorder.step
        name = rank_file(f"snapshot-step-{max(first, last)}.pickle", self._recorder.number)
        path = self._recorder.folder / name
        snapshot.write(path)
        size = path.stat().st_size
        if last < first:
            steps = f"step {first}, which did not finish"
        elif first == last:
            steps = f"step {first}"
        else:
            steps = f"steps {first} to {last}"
        text = f"Memory snapshot: {name}, {format_bytes(size)}, all allocations of {steps}"
        self._recorder.finish(snapshot.command, text, path=name, bytes=size, first=first, last=last)


def _change(before: Mapping[str, float], after: Mapping[str, float], key: str) -> str:
    return f"{format_bytes(before[key])} → {format_bytes(after[key])}"
