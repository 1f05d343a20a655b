"""Detect that a rank makes no step, and write `hang-rankK.json`.

The writer thread checks once a second whether a step is overdue, which takes microseconds. If so,
the thread `stepscope-hang` reads torch's Flight Recorder and the stack of the training thread. It
may wait for a lock of torch, and never blocks another thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from stepscope.common.clock import clock
from stepscope.common.files import atomic_write
from stepscope.common.formatting import format_duration
from stepscope.common.json_values import first_line
from stepscope.distributed.debug_pipe import note_captures
from stepscope.distributed.hangs.diagnose import FRESH_S, hang_of
from stepscope.distributed.hangs.job_state import Hang
from stepscope.distributed.hangs.record import (
    REFRESH_S,
    DiagnosedCause,
    HangRecord,
    capture,
    hang_name,
)
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunError, RunStatus, read_run
from stepscope.run.rank_info import torch_rank

WARM_STEPS = 5  # Number of first steps that compile and allocate.
USUAL_STEPS = 10.0  # Minimum duration of a hang, in usual step times.
LEAST_S = 5.0  # Minimum duration of a hang.
PATIENCE = 1.5  # As a multiple of the longest pause so far, such as for a checkpoint.
LOOKS = 30  # Number of updates with a step, of which the median is the usual step time.


@dataclass(slots=True)
class StallTimer:
    """Detector of overdue steps, updated about once a second; times in seconds of one clock."""

    longest_s: float = 0.0
    since: float | None = None  # Time of the last step or other work; None at first.
    _step: int = 0
    _sign: int = 0
    _seen: int = 0
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))

    @property
    def usual_s(self) -> float | None:
        """The usual step time; None before WARM_STEPS."""
        return median(self._times) if self._times and self._seen >= WARM_STEPS else None

    @property
    def limit_s(self) -> float | None:
        """Minimum time without a step that is a hang; None before WARM_STEPS."""
        usual_s = self.usual_s
        if usual_s is None:
            return None
        return max(LEAST_S, USUAL_STEPS * usual_s, PATIENCE * self.longest_s)

    def moved(self, now: float, ago_s: float, *, waited: bool) -> None:
        """Count a collective entered `ago_s` ago as a sign of work.

        `waited`: it ended a wait. Otherwise earlier ones may have been missed, and a long
        validation must not count as one long wait.
        """
        if self.since is None:
            return
        at = max(self.since, now - max(0.0, ago_s))
        if waited:
            self.longest_s = max(self.longest_s, at - self.since)
        self.since = at

    def look(self, now: float, step: int, *, due: bool, sign: int = 0) -> float | None:
        """Return the seconds without a step if that is a hang, otherwise None.

        `due`: the run trains and serves no command. `sign` increases with work other than steps.
        """
        if self.since is None or not due:
            self.since, self._step, self._sign = now, step, sign
            return None
        waited_s, steps = now - self.since, step - self._step
        if steps > 0:
            self._times.append(waited_s / steps)
            self._seen += steps
        if steps != 0 or sign != self._sign:
            if self._seen > WARM_STEPS + steps and waited_s >= LEAST_S:
                self.longest_s = max(self.longest_s, waited_s)
            self.since, self._step, self._sign = now, step, sign
            return None
        limit_s = self.limit_s
        return waited_s if limit_s is not None and waited_s >= limit_s else None


log = logging.getLogger(__name__)

NAMED, OVER = "hang", "hang_over"  # Event kinds: a cause is found; steps or collectives go on.
SOON_S = 1.5  # Time until the first diagnosis: other ranks write their files within a second.

Told = tuple[str, str, dict[str, Any]]  # Kind, text and data of an event.


class HangWatchdog:
    """Watchdog of the steps of one rank, created by its training thread.

    `busy` returns True while Stepscope delays the training. The writer thread calls `look` about
    once a second.
    """

    def __init__(
        self, recorder: Recorder, number: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.busy: Callable[[], bool] = lambda: False
        self._recorder = recorder
        self._number = number
        self._thread = threading.get_ident()
        self._clock = clock
        self._pace = StallTimer()
        self._events: deque[Told] = deque()
        self._hung: _Hung | None = None
        self._entered_s = 0.0  # Epoch seconds of the newest collective that is a sign of work.
        self._broken = False

    @property
    def text(self) -> str | None:
        """The cause of the present hang as a sentence; None without a hang or cause."""
        hung = self._hung
        return None if hung is None or hung.named is None else hung.named.what

    def look(self, run_json: Mapping[str, Any], step: int) -> list[Told]:
        """Begin or end the record of a hang; return the events to record."""
        try:
            self._look(run_json, step)
        except Exception as error:  # it must not end the writer thread
            self._broken = True
            log.warning(
                "stepscope: hangs are no longer detected; recording continues", exc_info=error
            )
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self, status: RunStatus) -> None:
        """Stop writing. The record stays, unless the run has finished."""
        hung, self._hung = self._hung, None
        self._broken = True
        if hung is not None:
            hung.end(remove=status is RunStatus.FINISHED)

    def _look(self, run_json: Mapping[str, Any], step: int) -> None:
        world_size = run_json.get("world_size", 1)
        if self._broken or not isinstance(world_size, int) or world_size < 2:
            return
        note_captures()
        total = run_json.get("total_steps")
        has_ended = type(total) is int and 0 < total <= step
        due = run_json.get("status") == RunStatus.RUNNING and not has_ended and not self.busy()
        now, hung = self._clock(), self._hung
        if hung is not None and hung.moved_s is not None:  # collectives are a sign of work
            self._entered_s = hung.moved_s
            self._pace.moved(now, clock.now() - hung.moved_s, waited=hung.has_record)
            self._end("Collectives")
        silent_s = self._pace.look(now, step, due=due, sign=self._recorder.signs)
        if silent_s is not None and self._hung is None:
            self._hung = self._begin(run_json, step, silent_s)
        elif silent_s is None:
            self._end("Steps")

    def _end(self, what: str) -> None:
        """End the record of a hang, if there is one, since `what` continue."""
        hung, self._hung = self._hung, None
        if hung is None:
            return
        hung.end(remove=True)
        if hung.named is not None:
            lasted = format_duration(clock.now() - hung.first.since)
            self._events.append((OVER, f"{what} go on after {lasted} without one", {}))

    def _begin(self, run_json: Mapping[str, Any], step: int, silent_s: float) -> _Hung:
        pid, now = run_json.get("pid"), clock.now()
        first = HangRecord(
            number=self._number,
            rank=torch_rank(run_json, self._number),
            step=step,
            since=now - silent_s,
            seen=now,
            usual_s=self._pace.usual_s,
            host=str(run_json.get("host", "")),
            pid=pid if type(pid) is int else os.getpid(),
        )
        known_s = max(first.since, self._entered_s)
        hung = _Hung(self._recorder, first, known_s, self._thread, self._on_cause)
        hung.start()
        return hung

    def _on_cause(self, hang: Hang) -> None:
        self._events.append((NAMED, hang.text, {**asdict(hang), "rank": hang.rank}))


class _Hung:
    """The record of one hang, written by a separate thread until `end`.

    The thread also ends if this rank enters a collective after `known_s`: at `moved_s`, in epoch
    seconds. `on_cause` is called when the diagnosis changes.
    """

    def __init__(
        self,
        recorder: Recorder,
        first: HangRecord,
        known_s: float,
        thread: int,
        on_cause: Callable[[Hang], None],
    ) -> None:
        self.first = first
        self.named: DiagnosedCause | None = None
        self.moved_s: float | None = None
        self.has_record = False
        self._known_s = known_s
        self._recorder = recorder
        self._path = recorder.folder / hang_name(first.number)
        self._training = thread
        self._on_cause = on_cause
        self._reported: tuple[Any, ...] | None = None
        self._over = threading.Event()
        self._writing = threading.Lock()

    def start(self) -> None:
        """Start the thread; logs a warning if the process cannot start threads."""
        thread = threading.Thread(target=self._work, name="stepscope-hang", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("stepscope: a hang cannot be examined: %s", error)

    def end(self, *, remove: bool) -> None:
        """Stop writing; delete the file if `remove`. Does not wait for the thread."""
        self._over.set()
        if remove:
            with self._writing:
                self._path.unlink(missing_ok=True)

    def _work(self) -> None:
        record, wait_s = self.first, SOON_S
        try:
            while not self._over.is_set():
                record = capture(record, self._training)
                if record.entered_s > self._known_s:
                    self.end(remove=True)
                    self.moved_s = record.entered_s
                    return
                self._write(record)
                if self._over.wait(wait_s):
                    return
                self._name()
                record = replace(record, named=self.named, seen=clock.now())
                self._write(record)
                if self._over.wait(REFRESH_S - wait_s):
                    return
                wait_s = REFRESH_S / 2
        except Exception as error:  # noqa: BLE001 - the training hangs, and must not fail for this
            log.warning("stepscope: a hang could not be recorded: %s", first_line(error))

    def _write(self, record: HangRecord) -> None:
        with self._writing:
            if self._over.is_set():
                return
            atomic_write(self._path, json.dumps(asdict(record)), durable=False)
            self.has_record = True

    def _name(self) -> None:
        """Diagnose the hang by the files of all ranks, in the lowest rank that hangs."""
        for number in range(self.first.number):
            with contextlib.suppress(OSError):
                written = (self._recorder.folder / hang_name(number)).stat().st_mtime
                if time.time() - written < FRESH_S:
                    return
        try:
            hang = hang_of(read_run(self._recorder.folder))
        except RunError:  # rank 0 starts just now, or its file is malformed
            return
        if hang is None:
            return
        self.named = DiagnosedCause(what=hang.what, rank=hang.rank, phase=hang.phase)
        key = hang.cause, hang.ranks, hang.group, hang.sequence
        if key != self._reported:
            self._reported = key
            self._on_cause(hang)
