"""Serves the page's buttons between two steps: the only place where they touch training."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping

from stepscope.recorder import Command, CommandName, Recorder
from stepscope.run import RunStatus
from trainer.checkpoint import write_checkpoint
from trainer.compute import Compute
from trainer.training import Training

PAUSED_POLL_S = 0.1  # how long a paused run may miss that the server ends
MARK_LENGTH = 200

Memory = Mapping[str, float]  # bytes by metric key


class RunStopped(Exception):
    """The run was asked to stop."""


class Commands:
    """Answers commands for one run; made and called by the training thread."""

    def __init__(
        self,
        recorder: Recorder,
        training: Training,
        *,
        stop: threading.Event,
        reset_process_peak: Callable[[], tuple[float, float]],
    ) -> None:
        self._recorder = recorder
        self._training = training
        self._compute: Compute = training.compute
        self._stop = stop
        self._reset_process_peak = reset_process_peak
        self._paused = False

    def serve(self, flush: Callable[[], None]) -> float:
        """Serve what was asked since the last boundary; return the seconds it took.

        `flush` logs the steps still under way, so that a marker stands after them. Stays here
        while the run is paused. Raises RunStopped.
        """
        commands = self._recorder.take_commands()
        if not commands and not self._stop.is_set():
            return 0.0
        began = time.perf_counter()
        flush()
        while True:
            for command in commands:
                self._serve_one(command)
            if self._stop.is_set():
                raise RunStopped("The server was shut down.")
            if not self._paused:
                return time.perf_counter() - began
            commands = self._recorder.wait_command(PAUSED_POLL_S)

    def _serve_one(self, command: Command) -> None:
        serve = {
            CommandName.PAUSE: self._pause,
            CommandName.RESUME: self._resume,
            CommandName.STOP: self._stop_run,
            CommandName.EMPTY_CACHE: self._empty_cache,
            CommandName.RESET_PEAKS: self._reset_peaks,
            CommandName.COLLECT_GARBAGE: self._collect_garbage,
            CommandName.SAVE_CHECKPOINT: self._save_checkpoint,
            CommandName.MARK: self._mark,
        }[command.name]
        serve(command)

    def _pause(self, command: Command) -> None:
        if self._paused:
            self._recorder.finish(command, "Pause: the run is paused already", ok=False)
            return
        self._paused = True
        self._recorder.set_status(RunStatus.PAUSED)
        self._recorder.finish(command, f"Pause: after step {self._training.step}")

    def _resume(self, command: Command) -> None:
        if not self._paused:
            self._recorder.finish(command, "Resume: the run is not paused", ok=False)
            return
        self._paused = False
        self._recorder.set_status(RunStatus.RUNNING)
        self._recorder.finish(command, "Resume")

    def _stop_run(self, command: Command) -> None:
        self._recorder.finish(command, f"Stop: after step {self._training.step}")
        raise RunStopped("Stopped from the page.")

    def _empty_cache(self, command: Command) -> None:
        before = self._compute.memory()
        self._compute.empty_cache()
        after = self._compute.memory()
        self._recorder.finish(command, empty_cache_text(before, after), before=before, after=after)

    def _reset_peaks(self, command: Command) -> None:
        before: dict[str, float] = dict(self._compute.memory())
        self._compute.reset_peaks()
        after: dict[str, float] = dict(self._compute.memory())
        before["process/peak_rss"], after["process/peak_rss"] = self._reset_process_peak()
        text = reset_peaks_text(before, after)
        self._recorder.finish(command, text, before=before, after=after)

    def _collect_garbage(self, command: Command) -> None:
        before = self._compute.memory()
        objects = gc.collect()
        after = self._compute.memory()
        key = "memory/allocated" if "memory/allocated" in after else "process/rss"
        word = "allocated" if key == "memory/allocated" else "process memory"
        text = f"Collect garbage: {objects:,} objects freed; {word} {_change(before, after, key)}"
        self._recorder.finish(command, text, before=before, after=after, objects=objects)

    def _save_checkpoint(self, command: Command) -> None:
        path = self._recorder.folder / f"step-{self._training.step}.pt"
        try:
            size = write_checkpoint(path, self._training.state_dict())
        except OSError as error:
            text = f"Save checkpoint: failed ({error}). Training goes on; free disk space"
            self._recorder.finish(command, text, ok=False)
            return
        text = f"Save checkpoint: {path.name}, {binary(size)}"
        self._recorder.finish(command, text, path=path.name, bytes=size)

    def _mark(self, command: Command) -> None:
        text = str(command.args.get("text", "")).strip()[:MARK_LENGTH]
        now = self._compute.memory()
        self._recorder.finish(command, text or "Mark", after=now)


def empty_cache_text(before: Memory, after: Memory) -> str:
    """What emptying the cache gave back, and what it could not."""
    if "memory/reserved" not in after:
        return (
            "Empty cache: a CPU run has no CUDA cache to empty; "
            f"process memory {_change(before, after, 'process/rss')}"
        )
    text = f"Empty cache: reserved {_change(before, after, 'memory/reserved')}"
    left = after["memory/reserved"]
    if left == 0:
        return f"{text}; nothing stays"
    held = after["memory/allocated"]
    free = left - held
    stays = f"{binary(left)} stay: {binary(held)} are tensors in use"
    if free > 0:
        stays += f", {binary(free)} free parts of blocks in use (fragmentation)"
    return f"{text}; {stays}"


def reset_peaks_text(before: Memory, after: Memory) -> str:
    """Where the peaks stood and start again."""
    if "memory/peak_allocated" not in after:
        return f"Reset peak stats: peak process memory {_change(before, after, 'process/peak_rss')}"
    return (
        f"Reset peak stats: peak allocated {_change(before, after, 'memory/peak_allocated')}, "
        f"peak reserved {_change(before, after, 'memory/peak_reserved')}"
    )


def binary(size: float) -> str:
    """Bytes in the largest binary unit that keeps the number above 1: "2.10 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"


def _change(before: Memory, after: Memory, key: str) -> str:
    return f"{binary(before.get(key, 0))} → {binary(after[key])}"
