"""The sweeps of this server: their list, and the child process of the one that runs.

Page and child share the sweep's folder. The server stops the child at its end; it can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from dashboard.run_files import tail
from dashboard.sweep_content import SweepContent, SweepStatus, to_content
from stepscope.common.files import is_own_folder, open_for_append
from stepscope.host.child_process import end_process
from stepscope.lab.folder import (
    LOCK,
    SWEEP_JSON,
    SweepError,
    new_sweep_folder,
    only_one,
    read_sweep,
    sweep_folder,
    sweep_folders,
    write_json,
)
from stepscope.lab.plan import SweepPlan, write_plan
from stepscope.run.folder import recorder_of
from trainer.runners.child_process import PROJECT

STOPPED = "Stopped before it began."

LAB_LOG = "lab.log"
STOP_TIMEOUT_S = 10.0
STARTING_S = 60.0  # Age up to which a sweep that another process has planned may still begin.
MAX_LISTED = 100
EXAMPLE = "This is a recorded example: read-only."


@dataclass(frozen=True, slots=True)
class StoredSweep:
    """A sweep at one moment, and why this page cannot stop, resume or delete it, or None."""

    folder: Path
    json: dict[str, Any]
    content: SweepContent
    read_only_reason: str | None

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def live(self) -> bool:
        return self.content.status.live


class Sweeps:
    """The sweeps of one server. Thread-safe. Methods raise SweepError, a sentence, and OSError."""

    def __init__(self, runs: Path, examples: Path) -> None:
        self._runs = runs
        self._examples = examples
        self._lock = threading.Lock()
        self._child: psutil.Popen | None = None  # of the sweep `_child_id`
        self._child_id: str | None = None
        self._ended: dict[Path, tuple[int, StoredSweep]] = {}

    def list_sweeps(self) -> list[StoredSweep]:
        """Return the readable sweeps, the newest first, then the examples."""
        found = []
        for root in (self._runs, self._examples):
            for folder in list(sweep_folders(root))[:MAX_LISTED]:
                with contextlib.suppress(SweepError):
                    found.append(self._read(folder))
        return found

    def read(self, sweep_id: str) -> StoredSweep:
        """Return a sweep or example. Raises SweepError for an unknown or unsafe id."""
        try:
            return self._read(sweep_folder(self._runs, sweep_id))
        except SweepError:
            with contextlib.suppress(SweepError):
                return self._read(sweep_folder(self._examples, sweep_id))
            raise

    def active_id(self) -> str | None:
        """Return the id of the sweep that runs on this host, or None."""
        host = socket.gethostname()
        live = (one for one in self.list_sweeps() if one.live)
        return next((one.id for one in live if one.json.get("host", host) == host), None)

    def start(self, plan: SweepPlan) -> str:
        """Start a sweep; return its id."""
        with self._lock:
            folder = new_sweep_folder(self._runs, plan.workload)
            write_plan(folder, plan)
            self._launch(folder)
            return folder.name

    def resume(self, sweep_id: str) -> None:
        """Continue a sweep that was stopped or whose process was killed."""
        with self._lock:
            sweep = self.read(sweep_id)
            reason = sweep.read_only_reason or self.not_resumable(sweep)
            if reason is not None:
                raise SweepError(f"Resume: {reason}")
            pending = {"status": SweepStatus.PENDING.value, "reason": None}
            write_json(sweep.folder / SWEEP_JSON, sweep.json | pending)
            self._launch(sweep.folder)

    def stop(self, sweep_id: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End a sweep, by force after `timeout_s`; a resumed one repeats the open round."""
        with self._lock:
            if self._child is not None and self._is_alive(sweep_id):
                end_process(self._child, timeout_s)
                return
            sweep = self._changeable("Stop", sweep_id)
            # Started in a terminal, or by a server that was killed.
            process = recorder_of(sweep.json, sweep.folder / LOCK)
            if process is not None:
                end_process(process, timeout_s)
            elif sweep.live:
                raise SweepError("Stop: its process was not found. Stop it in its terminal.")

    def delete(self, sweep_id: str) -> None:
        """Delete the folder of a sweep that no process works on."""
        with self._lock:
            sweep = self._changeable("Delete", sweep_id)
            if sweep.live:
                raise SweepError("Delete: the sweep still runs. Stop it first.")
            # sweep.json is not enough: a process may work on the sweep before it writes.
            with only_one(sweep.folder):
                shutil.rmtree(sweep.folder)
            self._ended.pop(sweep.folder, None)

    def close(self, timeout_s: float) -> None:
        """Stop the sweep that this server started; a second call does nothing."""
        with self._lock:
            child = self._child
            self._child = None
            self._child_id = None
        if child is not None and child.poll() is None:
            end_process(child, timeout_s)

    def _changeable(self, action: str, sweep_id: str) -> StoredSweep:
        sweep = self.read(sweep_id)
        if sweep.read_only_reason is not None:
            raise SweepError(f"{action}: {sweep.read_only_reason}")
        return sweep

    def not_resumable(self, sweep: StoredSweep) -> str | None:
        """Return why a sweep cannot be resumed from the page; None if it can."""
        if sweep.content.status is SweepStatus.FINISHED:
            return "the sweep has finished."
        if sweep.content.plan.script:
            return "a sweep over a script is resumed in a terminal, by its command with --folder."
        return "the sweep is running." if sweep.live else None

    def _launch(self, folder: Path) -> None:
        """Start the process that measures, in a process group that can be ended as a whole."""
        if self._child is not None and self._child.poll() is None:
            end_process(self._child, STOP_TIMEOUT_S)  # its sweep has ended; it may still exit
        with open(open_for_append(folder / LAB_LOG), "wb", buffering=0) as output:
            self._child = psutil.Popen(
                [sys.executable, "-m", "trainer.lab", "--folder", str(folder.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
                start_new_session=True,
            )
        self._child_id = folder.name

    def _is_alive(self, sweep_id: str) -> bool:
        child = self._child
        return sweep_id == self._child_id and child is not None and child.poll() is None

    def _read(self, folder: Path) -> StoredSweep:
        try:
            modified = os.stat(folder / SWEEP_JSON).st_mtime_ns
        except OSError as error:
            raise SweepError(f"{folder.name}: cannot be read ({error.strerror}).") from error
        known = self._ended.get(folder)
        if known is not None and known[0] == modified and not self._is_alive(folder.name):
            return known[1]
        try:
            json = read_sweep(folder)
            content = self._current(folder, to_content(json))
        except (ValueError, OverflowError) as error:
            raise SweepError(f"{folder.name}: {error}") from error
        sweep = StoredSweep(folder, json, content, self._read_only_reason(folder, json))
        if not sweep.live:
            self._ended[folder] = (modified, sweep)
        return sweep

    def _current(self, folder: Path, content: SweepContent) -> SweepContent:
        """Return the content of a sweep, which is stopped if its process has never begun."""
        if content.status is not SweepStatus.PENDING or self._is_alive(folder.name):
            return content
        age = abs(time.time() - content.created)  # of a future time too
        if folder.name != self._child_id and age <= STARTING_S:
            return content
        return replace(content, status=SweepStatus.STOPPED, reason=_exit_reason(folder))

    def _read_only_reason(self, folder: Path, content: dict[str, Any]) -> str | None:
        if folder.is_relative_to(self._examples):
            return EXAMPLE
        host = socket.gethostname()
        if content.get("host", host) != host:
            return f"This sweep belongs to the host {str(content['host'])[:60]}: read-only."
        if not is_own_folder(folder):
            return "The folder of this sweep belongs to another user: read-only."
        return None


def _exit_reason(folder: Path) -> str:
    """Return that a sweep ended early, with the last line of its output if it has any."""
    lines = (tail(folder / LAB_LOG) or "").strip().splitlines()
    end = f"The process exited before measuring: {lines[-1][:200]}" if lines else ""
    return end or STOPPED
