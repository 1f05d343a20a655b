"""Writer thread of a run folder: rows, events, run.json, and incoming commands."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.common.clock import clock
from stepscope.common.files import WakeableSleep, atomic_write
from stepscope.common.json_values import first_line
from stepscope.common.metrics import BY_KEY
from stepscope.run import HEARTBEAT_S, RUN_JSON, rank_json, write_run_json
from stepscope.store import SeriesBlock, StoreWriter, schema, store_name
from stepscope.store.blocks import STEPS, Event, find_broken_losses, join
from stepscope.store.final_values import final_values
from stepscope.store.ring import RingBuffer

log = logging.getLogger(__name__)

FLUSH_S = 0.5
"""Interval of commits; half of it without a mapped ring, which loses rows of a killed process."""
RETRY_S = 2.0  # pause after a failed write
QUEUE_LIMIT = 100_000  # maximum number of queued events (about 400 B each)
BATCH_LIMIT = 16_384  # rows, or events, of a commit: on a nearly full disk some batches still fit
BALLAST = "ballast"
BALLAST_BYTES, RESERVE_BYTES = 256 * 1024, 64 * 1024
"""Size of a file that is cut to the second size when the disk is full, for rows and run.json. The
rest is freed at the end of the run, for the last run.json."""
MAX_LISTED_CUSTOM = 64
_NUMBERED = re.compile(r"\.optimizer|\.group")

OnCommand = Callable[[int, str, str], None]
"""Called with a command's id, name and arguments (JSON), in the writer thread."""
TakeRows = Callable[[Mapping[tuple[str, ...], SeriesBlock], Sequence[Event]], None]
"""Called with the stored rows by stream and source, and events."""
FindEvents = Callable[[Mapping[str, Any], int], Sequence[tuple[str, str, dict[str, Any]]]]
"""Returns new events (kind, text, data) from run.json and the step, about once a second."""


class WriterThread:
    """Writes one rank's files of a run folder until `close`.

    The owner changes `run_json` under `run_json_lock`. `progress` returns the entries that change
    at every step. Raises StoreError or OSError if the folder cannot be set up.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        run_json: dict[str, Any],
        *,
        progress: Callable[[], dict[str, Any]],
        offer: OnCommand,
    ) -> None:
        self.folder = folder
        self.run_json = run_json
        self.run_json_lock = threading.RLock()  # a signal handler may come in the middle
        self.observer: tuple[TakeRows, FindEvents] | None = None
        self._failure = ""  # The error of the last write that failed.
        self._json = rank_json(rank)
        self._ballast = folder / (BALLAST if rank == 0 else f"rank{rank}.{BALLAST}")
        self._progress = progress
        self._offer = offer
        self._queue: deque[Event] = deque()
        self._closing = threading.Event()
        self._next_flush = time.monotonic() + FLUSH_S
        self._next_beat = time.monotonic() + HEARTBEAT_S  # run.json has just been written
        self._broken_losses: set[str] = set()
        self._logged: set[str] = set()
        with contextlib.ExitStack() as undo:  # a failed start leaves no files
            self._store = StoreWriter(folder / store_name(rank))
            undo.callback(schema.delete, folder / store_name(rank))
            undo.callback(self._store.close)
            # Before the ring, which takes most of a small disk.
            undo.callback(self._ballast.unlink, missing_ok=True)
            # Random bytes: a file system may compress zeros.
            atomic_write(self._ballast, os.urandom(BALLAST_BYTES), durable=False)
            self._sleeper = WakeableSleep(folder)  # touched by `send_command`
            self.wake = self._sleeper.wake
            self.ring = RingBuffer(folder / f"rank{rank}.ring")
            undo.callback(self.ring.delete)
            undo.callback((folder / self._json).unlink, missing_ok=True)
            write_run_json(folder, run_json, self._json)
            self._thread = threading.Thread(target=self._work, name="stepscope-writer", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                raise OSError(str(error)) from error
            undo.pop_all()
        if self.ring.reason:
            log.warning(
                "stepscope: %s; a killed process may lose its last half second", self.ring.reason
            )

    def put(self, event: Event) -> None:
        """Queue an event; count it as dropped if the queue is full."""
        if len(self._queue) >= QUEUE_LIMIT:
            self.ring.dropped += 1
        else:
            self._queue.append(event)

    def close(self, timeout_s: float) -> None:
        """Write the pending rows and events, and end the thread; idempotent."""
        self.ring.stop()
        self._closing.set()
        self.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("stepscope-writer did not end within %.1f s", timeout_s)

    def leave(self) -> None:
        """Detach a forked child, which has no such thread and whose locks may be held."""
        self.run_json_lock = threading.RLock()
        self.wake = lambda: None  # the child must not wake the parent's thread
        self.ring.leave()

    def _work(self) -> None:
        is_ended = False
        while not is_ended:
            is_ended = self._closing.is_set()
            try:
                if is_ended:
                    self._end()
                else:
                    self._serve()
            except Exception as error:  # noqa: BLE001 - the recording would end with this thread
                self._log_once("the writer failed and retries", error, traceback=True)
                self._closing.wait(RETRY_S)
        self._store.close()
        self._sleeper.close()
        if self.ring.waiting() <= 0:  # else `recover` stores the rows
            with contextlib.suppress(OSError):  # such as a folder that was moved away
                self.ring.delete()

    def _serve(self) -> None:
        """Sleep, then write what is due."""
        woken = self._sleeper.sleep(min(self._next_flush, self._next_beat) - time.monotonic())
        if self._closing.is_set():
            return
        now = time.monotonic()
        if woken or now >= self._next_flush:
            flush_s = FLUSH_S if self.ring.reason is None else FLUSH_S / 2
            self._next_flush = now + (flush_s if self._flush() else RETRY_S)
        is_due = now >= self._next_beat
        if is_due:
            self._next_beat = now + HEARTBEAT_S
            self._poll_observer()
        if woken or is_due:
            self._beat()
        self._sleeper.forget_touches()  # before the poll: a later touch has a later command
        self._poll_commands()

    def _end(self) -> None:
        """Write the last rows and events, and the last run.json."""
        self._flush()
        self._poll_observer()
        if not self._flush():
            self._note_unstored()
        with contextlib.suppress(OSError):  # the end of the run is still written
            self._ballast.unlink(missing_ok=True)
        self._beat(durable=True)
        if self._json == RUN_JSON:
            self._note_final_values()

    def _flush(self) -> bool:
        """Commit pending rows and events, at the end also new ones; return False on failure."""
        while self.ring.waiting() > 0 or self._queue:
            if not self._store_batch():
                return False
            if self.run_json["problem"]:
                log.warning("stepscope: the store can be written again")
                self.run_json["problem"] = None
            is_long = max(self.ring.waiting(), len(self._queue)) >= BATCH_LIMIT
            if not is_long and not self._closing.is_set():
                break  # each commit costs a millisecond of a core that the training may need
        return True

    def _note_unstored(self) -> None:
        """Record how many rows and events a full disk or a locked store did not take."""
        unstored, lost = self.ring.waiting(), len(self._queue)
        self._queue.clear()
        self.run_json["problem"] = None
        if self.ring.reason is not None:  # in memory
            lost += unstored
        elif unstored:
            self.run_json["problem"] = (
                f"{unstored:,} rows are not in the store ({self._failure}) but in "
                f"{self.ring.path.name}. Remove the cause, then open the run on this host."
            )
            log.warning("stepscope: %s", self.run_json["problem"])
        if lost:
            self.ring.dropped += lost
            self.run_json["dropped_reason"] = self._failure
            log.error("stepscope: %d rows and events are lost: %s", lost, self._failure)

    def _store_batch(self) -> bool:
        """Commit the oldest rows and events and release them; return False to retry later."""
        rows = self.ring.pending(BATCH_LIMIT)
        events = list(itertools.islice(self._queue, BATCH_LIMIT))
        try:
            with self._store.transaction():
                blocks = self._store.append_slots(rows)
                for event in events:
                    self._store.add_event(event)
        except (sqlite3.OperationalError, OSError, MemoryError) as error:
            self._note_problem(error)
            return False
        except Exception as error:  # noqa: BLE001 - the later rows must be stored
            blocks = {STEPS: join([])}
            lost = len(rows.slots) + len(events)
            self.ring.dropped += lost
            self._log_once(f"{lost} rows and events could not be stored and are lost", error)
        self.ring.release(rows)
        for _ in events:
            self._queue.popleft()
        steps = blocks[STEPS]
        self._note_custom(steps.keys)
        for event in find_broken_losses(steps, self._broken_losses, self._progress()["epoch"]):
            self.put(event)
        if self.observer is not None:
            self.observer[0](blocks, events)
        return True

    def _poll_observer(self) -> None:
        """Queue the new events of the observer."""
        if self.observer is None:
            return
        progress = self._progress()
        for kind, text, data in self.observer[1](self.run_json, progress["step"]):
            self.put(Event(clock.now(), progress["step"], progress["epoch"], kind, text, data))
            self.wake()

    def _note_custom(self, keys: tuple[str, ...]) -> None:
        """List the run's custom metrics in run.json, for the page."""
        known = self.run_json.get("custom") or ()
        own = [key for key in keys if key not in BY_KEY and not _NUMBERED.search(key)]
        custom = list(dict.fromkeys([*known, *own]))[:MAX_LISTED_CUSTOM]
        if len(custom) > len(known):
            with self.run_json_lock:
                self.run_json["custom"] = custom

    def _note_final_values(self) -> None:
        """Add the values of the whole run to run.json: lists of runs then read no store."""
        try:
            found = final_values(self.folder, self.run_json)
        except Exception as error:  # noqa: BLE001 - the end of the run is already written
            self._log_once("the final values are missing in run.json", error)
            return
        with self.run_json_lock:
            self.run_json.update(found)
        self._beat()

    def _note_problem(self, error: Exception) -> None:
        self._failure = first_line(error)
        where = "memory, and are lost when the run ends"
        if self.ring.reason is None:
            where = self.ring.path.name
        problem = (
            f"Recording is delayed: {self._failure}. Training continues. Until you free disk space "
            f"or repair the folder, new rows stay in {where}."
        )
        if self.run_json["problem"] is None:
            log.warning("stepscope: %s", problem)
            with contextlib.suppress(OSError):
                os.truncate(self._ballast, RESERVE_BYTES)
        self.run_json["problem"] = problem

    def _log_once(self, what: str, error: Exception, *, traceback: bool = False) -> None:
        text = f"{what}: {type(error).__name__}: {first_line(error)}"
        if text not in self._logged:
            self._logged.add(text)
            log.error("stepscope: %s", text, exc_info=error if traceback else None)

    def _beat(self, *, durable: bool = False) -> None:
        """Write run.json; on a full disk, touch the old file as a heartbeat."""
        with self.run_json_lock:
            self.run_json["heartbeat"] = time.time()
            self.run_json.update(self._progress(), dropped=self.ring.dropped)
            run_json = dict(self.run_json)
        try:
            write_run_json(self.folder, run_json, self._json, durable=durable)
        except OSError as error:
            if durable:
                self._log_once("the end of the run could not be written", error)
            self._note_problem(error)
            with contextlib.suppress(OSError):
                os.utime(self.folder / self._json)

    def _poll_commands(self) -> None:
        try:
            for command_id, name, args in self._store.take_commands():
                self._offer(command_id, name, args)
        except sqlite3.Error as error:
            self._note_problem(error)
