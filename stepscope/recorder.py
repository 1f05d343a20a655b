"""What a training loop calls: log a step, mark an event, take commands.

Calls put a row into a queue and return; one writer thread moves them into the run folder four
times a second, and at once for events. Rows leave the queue only after their commit, so a killed
process loses at most the rows of the last quarter second, and a full disk none that fit in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.metrics import Stream
from stepscope.run import HEARTBEAT_S, RUN_JSON, RunStatus, process_identity, write_run_json
from stepscope.store import STORE_NAME, Block, RunWriter

log = logging.getLogger(__name__)

COMMAND_POLL_S = 0.05
FLUSH_S = 0.25
RETRY_S = (0.5, 8.0)
"""First and longest pause after a failed write."""
QUEUE_LIMIT = 500_000
"""Rows kept while the disk refuses them (about 400 B each); later rows are counted as dropped."""
BATCH_LIMIT = 50_000
BALLAST = "ballast"
BALLAST_BYTES = 256 * 1024
"""Freed when the disk is full, so that run.json can still say so."""


class CommandName(StrEnum):
    """What a page may ask of a run."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    EMPTY_CACHE = "empty_cache"
    RESET_PEAKS = "reset_peaks"
    COLLECT_GARBAGE = "collect_garbage"
    SAVE_CHECKPOINT = "save_checkpoint"
    MARK = "mark"
    MEMORY_SNAPSHOT = "memory_snapshot"


@dataclass(frozen=True, slots=True)
class Command:
    """One command asked of this run; `args` is as the page gave it: check before use."""

    id: int
    name: CommandName
    args: dict[str, Any]


Values = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class _Row:
    stream: str
    source: str
    ts: float
    step: int
    values: Values


@dataclass(frozen=True, slots=True)
class _Event:
    ts: float
    step: int
    epoch: int
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Ended:
    command_id: int
    state: str
    ts: float
    result: str


class Recorder:
    """Records one run into `folder`; safe to call from several threads.

    Raises StoreError or OSError if the folder cannot be set up; no later call raises.
    """

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.step = 0
        self.epoch = 0
        self.dropped = 0
        now = time.time()
        self._facts: dict[str, Any] = {
            "schema": 1, "name": name, "created": now, "status": RunStatus.PENDING, "reason": None,
            "heartbeat": now, "problem": None, "config": dict(config or {}), **process_identity(),
        }  # fmt: skip
        self._facts_lock = threading.Lock()
        self._queue: deque[_Row | _Event | _Ended] = deque()
        self._commands: deque[Command] = deque()
        self._command_came = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        write_run_json(folder, self._facts)
        self._writer = RunWriter(folder / STORE_NAME)
        self._fill_ballast()
        self._thread = threading.Thread(target=self._work, name="stepscope-writer", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Values, ts: float | None = None) -> None:
        """Record a step's metrics; `step` must not fall, None means no value."""
        self.step = step
        self._put(_Row(Stream.STEPS, "", time.time() if ts is None else ts, step, values))

    def sample(self, values: Values) -> None:
        """Record one sampler tick of process, host and allocator."""
        self._put(_Row(Stream.SAMPLES, "", time.time(), self.step, values))

    def device(self, uuid: str, values: Values) -> None:
        """Record one sampler tick of a GPU."""
        self._put(_Row(Stream.DEVICES, uuid, time.time(), self.step, values))

    def event(self, kind: str, text: str, **data: Any) -> None:
        """Mark an event now; `data` must be JSON-able."""
        self._put(_Event(time.time(), self.step, self.epoch, kind, text, data))
        self._wake.set()

    def describe(self, **facts: Any) -> None:
        """Add facts to run.json, such as total_steps or environment."""
        with self._facts_lock:
            self._facts.update(facts)
        self._wake.set()

    def take_commands(self) -> list[Command]:
        """Return the commands that came since the last call; costs about 50 ns when none did."""
        if not self._commands:
            return []
        # Cleared before emptying: a command that comes in between sets it again.
        self._command_came.clear()
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    def wait_command(self, timeout_s: float) -> list[Command]:
        """Wait for a command, at most `timeout_s`; for a paused loop."""
        self._command_came.wait(timeout_s)
        return self.take_commands()

    def finish(self, command: Command, text: str, *, ok: bool = True, **data: Any) -> None:
        """Acknowledge a command and mark what it did, such as before={...} and after={...}."""
        state = "done" if ok else "refused"
        self._put(_Ended(command.id, state, time.time(), text))
        self.event(command.name, text, ok=ok, command_id=command.id, **data)

    def set_status(self, status: RunStatus, reason: str | None = None) -> None:
        """Change the run's status; `reason` is one sentence for the page."""
        self.describe(status=status, reason=reason)

    def close(self, status: RunStatus, reason: str | None = None, timeout_s: float = 4.0) -> None:
        """Write what is left and the final status; a second call does nothing."""
        if self._closing:
            return
        self.describe(status=status, reason=reason, ended=time.time())
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("stepscope-writer did not end within %.1f s", timeout_s)

    def _put(self, item: _Row | _Event | _Ended) -> None:
        if len(self._queue) >= QUEUE_LIMIT:
            self.dropped += 1
        else:
            self._queue.append(item)

    # Below: the writer thread.

    def _work(self) -> None:
        version, next_flush, next_beat, pause_s = -1, 0.0, 0.0, RETRY_S[0]
        while True:
            closing = self._closing
            woken = self._wake.wait(COMMAND_POLL_S)
            self._wake.clear()
            now = time.monotonic()
            if woken or closing or now >= next_flush:
                failed = self._flush()
                pause_s = min(pause_s * 2, RETRY_S[1]) if failed else RETRY_S[0]
                next_flush = now + (pause_s if failed else FLUSH_S)
            if woken or closing or now >= next_beat:
                self._beat()
                next_beat = now + HEARTBEAT_S
            if closing:
                break
            version = self._poll_commands(version)
        self._writer.close()
        (self.folder / BALLAST).unlink(missing_ok=True)

    def _flush(self) -> bool:
        """Write what is queued; return True where the disk refused it."""
        while self._queue:
            batch = list(itertools.islice(self._queue, BATCH_LIMIT))
            try:
                with self._writer.transaction():
                    self._write(batch)
            except (sqlite3.Error, OSError) as error:
                self._note_problem(error)
                return True
            except (TypeError, ValueError) as error:
                # One row that no store can hold must not block all later ones.
                log.error("stepscope: %d rows could not be stored and are lost: %s",
                          len(batch), error)  # fmt: skip
                self.dropped += len(batch)
            for _ in batch:
                self._queue.popleft()
            if self._facts["problem"]:
                log.warning("stepscope: the store can be written again")
                self._facts["problem"] = None
                self._fill_ballast()
        return False

    def _write(self, batch: list[_Row | _Event | _Ended]) -> None:
        rows: dict[tuple[str, str], list[tuple[float, int, Values]]] = {}
        for item in batch:
            if isinstance(item, _Row):
                series = rows.setdefault((item.stream, item.source), [])
                series.append((item.ts, item.step, item.values))
            elif isinstance(item, _Event):
                self._writer.add_event(
                    item.ts, item.step, item.epoch, item.kind, item.text, item.data
                )
            else:
                self._writer.end_command(item.command_id, item.state, item.ts, item.result)
        for (stream, source), series in rows.items():
            self._writer.append(stream, source, Block.from_rows(series))

    def _note_problem(self, error: Exception) -> None:
        problem = (
            f"Recording is held up: {error}. Training goes on and the rows wait in memory; "
            "free disk space or repair the folder."
        )
        if self._facts["problem"] is None:
            log.warning("stepscope: %s", problem)
            with contextlib.suppress(OSError):
                (self.folder / BALLAST).write_bytes(b"")
        self._facts["problem"] = problem

    def _beat(self) -> None:
        """Write run.json; on a disk that takes no more, touch the old one as a sign of life."""
        with self._facts_lock:
            self._facts["heartbeat"] = time.time()
            self._facts.update(step=self.step, epoch=self.epoch, dropped=self.dropped)
            facts = dict(self._facts)
        try:
            write_run_json(self.folder, facts)
        except OSError as error:
            self._note_problem(error)
            with contextlib.suppress(OSError):
                os.utime(self.folder / RUN_JSON)

    def _poll_commands(self, version: int) -> int:
        """Move newly asked commands to the loop; return the store's data version."""
        try:
            current = self._writer.data_version()
            if current == version:
                return version
            for command_id, name, args in self._writer.take_commands():
                self._offer(command_id, name, args)
        except sqlite3.Error as error:
            self._note_problem(error)
            return version
        return current

    def _offer(self, command_id: int, name: str, args: str) -> None:
        try:
            command = Command(command_id, CommandName(name), dict(json.loads(args)))
        except (ValueError, TypeError) as error:
            self._put(_Ended(command_id, "refused", time.time(), f"not a command: {error}"))
            return
        self._commands.append(command)
        self._command_came.set()

    def _fill_ballast(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / BALLAST).write_bytes(b"\0" * BALLAST_BYTES)
