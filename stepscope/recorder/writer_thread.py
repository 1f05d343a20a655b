"""The one thread that writes a run folder: rows, events, run.json, and takes commands from it.

Rows leave the ring and the queue only after their commit; while the disk refuses to write they
wait there, and run.json says so.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepscope.common.clock import MIN_OFFSET_S, clock
from stepscope.common.files import Sleeper, atomic_write
from stepscope.common.formatting import format_duration
from stepscope.common.json_values import first_line
from stepscope.metrics import BY_KEY, Stream
from stepscope.recorder.ring import Pending, Ring
from stepscope.recorder.rows import StepRows
from stepscope.run import HEARTBEAT_S, rank_json, write_run_json
from stepscope.store import Block, RunWriter, store_name
from stepscope.store.blocks import Event, Item, Observer, Sample, Values

log = logging.getLogger(__name__)

COMMAND_POLL_S = 0.05
"""How often to look for commands where inotify cannot tell of one; elsewhere one ends the sleep."""
FLUSH_S = 0.5
"""Rows of steps are safe in the mapped ring before; the page asks twice a second. Without a mapped
ring it is half of that: with the commit itself, a killed process loses 0.5 s at most."""
RETRY_S = (0.5, 8.0)
"""First and longest pause after a failed write."""
QUEUE_LIMIT = 100_000
"""Samples and events kept while the disk refuses them (about 400 B each)."""
BATCH_LIMIT = 50_000
BALLAST = "ballast"
BALLAST_BYTES = 256 * 1024
"""Freed when the disk is full, so that run.json can still say so."""
CUSTOM_LISTED = 64
TOLD_LIMIT = 20
"""Different errors that the log is told of."""
SALVAGE_TRIES = 64
"""Commits tried, one after another, to find the rows that no store can hold."""

Offer = Callable[[int, str, str], None]
"""Takes a command's id, name and arguments (JSON), in this thread."""


class WriterThread:
    """Writes one rank's part of a run folder from its making to `close`.

    `run_json` is the content of run.json; the owner changes it under `run_json_lock`. `progress`
    returns the entries that change at every step. Raises StoreError or OSError where the folder
    cannot be set up.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        run_json: dict[str, Any],
        *,
        progress: Callable[[], dict[str, Any]],
        offer: Offer,
    ) -> None:
        self.folder = folder
        self.run_json = run_json
        self.run_json_lock = threading.RLock()  # a signal handler may come in the middle
        self.observer: Observer | None = None
        self._lost = 0
        self._json = rank_json(rank)
        self._progress = progress
        self._offer = offer
        self._queue: deque[Item] = deque()
        self._closing = threading.Event()
        self._ended = False
        self._steps = StepRows()
        self._custom: dict[str, None] = {}
        self._told: set[str] = set()
        self._wall_offset_s = 0.0
        with contextlib.ExitStack() as undo:  # a run that cannot begin leaves nothing behind
            self._store = RunWriter(folder / store_name(rank))
            undo.callback((folder / store_name(rank)).unlink, missing_ok=True)
            undo.callback(self._store.close)
            self._sleeper = Sleeper(folder)  # touched by who sends a command
            self.wake = self._sleeper.wake
            self.ring = Ring(folder / f"rank{rank}.ring", crowded=self.wake)
            undo.callback(self.ring.close)
            self._fill_ballast()
            undo.callback((folder / BALLAST).unlink, missing_ok=True)
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

    @property
    def dropped(self) -> int:
        """Rows and events lost because too many waited, or this thread died writing them."""
        return self._lost + self.ring.dropped + self.ring.lost

    def put(self, item: Item) -> None:
        """Queue an item; when too many wait it is counted as dropped."""
        if len(self._queue) >= QUEUE_LIMIT:
            self._lost += 1
        else:
            self._queue.append(item)

    def close(self, timeout_s: float) -> None:
        """Write what is left and end; a second call does nothing."""
        self.ring.stop()
        self._closing.set()
        self.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("stepscope-writer did not end within %.1f s", timeout_s)

    def leave(self) -> None:
        """In a forked child, where this thread does not exist and its locks may be held."""
        self.run_json_lock = threading.RLock()
        self.wake = lambda: None  # the parent's thread must not hear of the child
        self.ring.leave()

    def _work(self) -> None:
        pause_s = RETRY_S[0]
        while not self._ended:
            begun, last_try = time.monotonic(), self._closing.is_set()
            try:
                self._loop()
            except Exception as error:  # noqa: BLE001 - the recording would end with this thread
                self._say_once("the writer stumbled and goes on", error, traceback=True)
                self._ended = last_try
                if time.monotonic() - begun > RETRY_S[1]:
                    pause_s = RETRY_S[0]
                self._closing.wait(pause_s)
                pause_s = min(pause_s * 2, RETRY_S[1])
        self._store.close()
        self._sleeper.close()
        if self.ring.waiting() <= 0:  # what could not be stored stays in the ring's file
            self.ring.close()
        (self.folder / BALLAST).unlink(missing_ok=True)

    def _loop(self) -> None:
        version, pause_s = -1, RETRY_S[0]
        flush_s = FLUSH_S if self.ring.reason is None else FLUSH_S / 2
        next_flush = time.monotonic() + flush_s
        next_beat = time.monotonic() + HEARTBEAT_S  # run.json has just been written
        next_look = next_beat
        while True:
            timeout_s = min(next_flush, next_beat, next_look) - time.monotonic()
            if self._closing.is_set():
                timeout_s = 0.0
            elif not self._sleeper.sees_touches:
                timeout_s = min(timeout_s, COMMAND_POLL_S)
            woken = self._sleeper.sleep(timeout_s)
            closing = self._closing.is_set()
            self._note_clock()
            now = time.monotonic()
            if woken or closing or now >= next_flush:
                failed = self._flush(closing)
                pause_s = min(pause_s * 2, RETRY_S[1]) if failed else RETRY_S[0]
                next_flush = now + (pause_s if failed else flush_s)
            if closing or now >= next_look:
                self._ask_observer(closing)
                next_look = now + HEARTBEAT_S
            if woken or closing or now >= next_beat:
                self._beat(durable=closing)
                next_beat = now + HEARTBEAT_S
            if closing:
                self._ended = True
                return
            self._sleeper.forget_touches()  # a later one comes with a command not looked for yet
            version = self._poll_commands(version)

    def _flush(self, everything: bool) -> bool:
        """Write what waits, and with `everything` what has come meanwhile; return True where the
        disk refused it."""
        while self.ring.waiting() > 0 or self._queue:
            rows = self.ring.pending(everything=everything)
            batch = list(itertools.islice(self._queue, BATCH_LIMIT))
            if rows.upto == self.ring.drained and not batch:
                break  # a slot is claimed and not written yet
            if not self._store_what_can_be(rows, batch):
                return True
            self._note_recovery()
            if not everything and len(self._queue) < BATCH_LIMIT:
                break  # each commit costs a millisecond of a core that the training may want
        return False

    def _store_rows(self, rows: Pending, batch: Sequence[Item]) -> None:
        """Commit these and let go of them; where that fails all is as before."""
        steps = copy.copy(self._steps)
        steps.broken = []
        block = steps.block(rows.slots, self.ring.layouts())
        with self._store.transaction():
            self._write(block, steps, batch)
            self._store.store_slots(rows.upto)
        self._steps = steps
        self.ring.release(rows)
        self._forget(batch)
        if self.observer is not None:
            self.observer.saw(block, batch)

    def _store_what_can_be(self, rows: Pending, batch: Sequence[Item]) -> bool:
        """Store these, without the rows that no store can hold; return False where the disk refuses
        or it takes too long: the rest waits."""
        waiting = [(rows, batch)]
        for _ in range(SALVAGE_TRIES):
            if not waiting:
                break
            rows, batch = waiting.pop()
            try:
                self._store_rows(rows, batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, the rest must not wait
                if _is_held_up(error):
                    self._note_problem(error)
                    return False
                parts = _halves(rows, batch)
                if len(parts) > 1:
                    waiting += reversed(parts)  # what comes first is stored first
                    continue
                self.ring.release(rows)
                self._forget(batch)
                self._lost += len(rows.slots) + len(batch)
                self._say_once("a row could not be stored and is lost", error)
        return not waiting

    def _forget(self, batch: Sequence[Item]) -> None:
        for _ in batch:
            self._queue.popleft()

    def _write(self, block: Block, steps: StepRows, batch: Sequence[Item]) -> None:
        if len(block):
            self._store.append(Stream.STEPS, "", block)
            self._note_custom(block.keys)
        for broken in steps.broken:
            epoch = self._progress()["epoch"]
            self._store.add_event(broken.ts, broken.step, epoch, "nan", broken.text, {})
        rows: dict[tuple[str, str], list[tuple[float, int, Values]]] = {}
        for item in batch:
            if isinstance(item, Sample):
                series = rows.setdefault((item.stream, item.source), [])
                series.append((item.ts, item.step, item.values))
            elif isinstance(item, Event):
                self._store.add_event(
                    item.ts, item.step, item.epoch, item.kind, item.text, item.data
                )
            else:
                self._store.end_command(item.command_id, item.state, item.ts, item.result)
        for (stream, source), series in rows.items():
            self._store.append(stream, source, Block.from_rows(series))

    def _ask_observer(self, closing: bool) -> None:
        """Write the events that the observer has to add; at the end no later flush would."""
        if self.observer is None:
            return
        progress = self._progress()
        says = self.observer.look(self.run_json, progress["step"])
        for kind, text, data in says:
            self.put(Event(clock.now(), progress["step"], progress["epoch"], kind, text, data))
        if says and closing:
            self._flush(True)
        elif says:
            self.wake()

    def _note_clock(self) -> None:
        """Add an event where somebody has set the wall clock; the run's times go on as before."""
        offset_s, before_s = clock.wall_offset(), self._wall_offset_s
        set_by_s = offset_s - before_s
        if abs(set_by_s) < MIN_OFFSET_S:
            return
        self._wall_offset_s = offset_s
        with self.run_json_lock:
            self.run_json["wall_offset_s"] = offset_s
        progress, way = self._progress(), "forward" if set_by_s > 0 else "back"
        text = f"The system clock was set {way} by {format_duration(round(abs(set_by_s)))}"
        data = {"set_by_s": set_by_s, "wall_offset_s": offset_s}
        self.put(Event(clock.now(), progress["step"], progress["epoch"], "clock_set", text, data))

    def _note_custom(self, keys: tuple[str, ...]) -> None:
        """List the metrics that only this run has: the page draws them too."""
        fresh = [
            key
            for key in keys
            if key not in BY_KEY
            and key not in self._custom
            and ".optimizer" not in key
            and ".group" not in key
        ]
        if fresh and len(self._custom) < CUSTOM_LISTED:
            self._custom.update(dict.fromkeys(fresh))
            with self.run_json_lock:
                self.run_json["custom"] = list(self._custom)[:CUSTOM_LISTED]

    def _note_problem(self, error: Exception) -> None:
        problem = (
            f"Recording is delayed: {first_line(error)}. Training continues and rows wait in "
            "memory; free disk space or repair the folder."
        )
        if self.run_json["problem"] is None:
            log.warning("stepscope: %s", problem)
            with contextlib.suppress(OSError):
                (self.folder / BALLAST).unlink(missing_ok=True)
        self.run_json["problem"] = problem

    def _say_once(self, what: str, error: Exception, *, traceback: bool = False) -> None:
        told = f"{what}: {type(error).__name__}: {first_line(error)}"
        if told not in self._told and len(self._told) < TOLD_LIMIT:
            self._told.add(told)
            log.error("stepscope: %s", told, exc_info=error if traceback else None)

    def _note_recovery(self) -> None:
        if self.run_json["problem"]:
            log.warning("stepscope: the store can be written again")
            self.run_json["problem"] = None
            self._fill_ballast()

    def _beat(self, *, durable: bool) -> None:
        """Write run.json; on a full disk, touch the old one as a sign of life.

        Only the last one waits for the disk. Waiting takes 6 ms, at times 50, against 0.5 ms
        without, and no command is taken meanwhile; the next second's file makes it needless.
        """
        with self.run_json_lock:
            self.run_json["heartbeat"] = time.time()
            self.run_json.update(self._progress(), dropped=self.dropped)
            run_json = dict(self.run_json)
        try:
            write_run_json(self.folder, run_json, self._json, durable=durable)
        except OSError as error:
            self._note_problem(error)
            with contextlib.suppress(OSError):
                os.utime(self.folder / self._json)

    def _poll_commands(self, version: int) -> int:
        """Offer newly asked commands; return the store's data version."""
        try:
            current = self._store.data_version()
            if current == version:
                return version
            for command_id, name, args in self._store.take_commands():
                self._offer(command_id, name, args)
        except sqlite3.Error as error:
            self._note_problem(error)
            return version
        return current

    def _fill_ballast(self) -> None:
        with contextlib.suppress(OSError):
            atomic_write(self.folder / BALLAST, bytes(BALLAST_BYTES), durable=False)


def _is_held_up(error: Exception) -> bool:
    """Say whether the same rows may be stored later; else they are at fault themselves."""
    of_the_row = (sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.DataError)
    if isinstance(error, of_the_row):
        return False
    return isinstance(error, sqlite3.Error | OSError | MemoryError)


def _halves(rows: Pending, batch: Sequence[Item]) -> list[tuple[Pending, Sequence[Item]]]:
    """Return steps and other rows apart, then each in halves; a single one as it is."""
    behind = Pending(rows.slots[:0], rows.upto, 0)  # what is lost counts once, with `rows`
    if len(rows.slots) and batch:
        return [(rows, ()), (behind, batch)]
    half = max(len(rows.slots), len(batch)) // 2
    if half == 0:
        return [(rows, batch)]
    if batch:
        return [(rows, batch[:half]), (behind, batch[half:])]
    first = Pending(rows.slots[:half], int(rows.slots["number"][half - 1]), 0)
    return [(first, ()), (Pending(rows.slots[half:], rows.upto, rows.lost), ())]
