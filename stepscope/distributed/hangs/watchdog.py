"""Write `hang-rankK.json` while a rank makes no step.

The writer thread checks once a second whether a step is overdue, which takes microseconds. If so,
the thread `stepscope-hang` reads torch's Flight Recorder and the stack of the training thread. It
may wait for a lock of torch, and never blocks another thread.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stepscope.common.clock import clock
from stepscope.common.files import atomic_write
from stepscope.common.formatting import format_duration
from stepscope.common.json_values import first_line
from stepscope.common.stall_detector import StallDetector, StepGap
from stepscope.distributed.flight_recorder import note_captures
from stepscope.distributed.hangs.cases import FRESH_S, Hang, hang_of
from stepscope.distributed.hangs.record import HangRecord, age_s, capture, hang_name
from stepscope.run import RunError, RunStatus, read_run
from stepscope.run.rank_info import torch_rank
from stepscope.store.recorder import Recorder

log = logging.getLogger(__name__)

FOUND, OVER = "hang", "hang_over"  # Event kinds: a cause is found; steps or collectives go on.
MIN_HANG_S = 5.0  # Minimum duration of a hang.
FIRST_DIAGNOSIS_S = (
    1.5  # Time until the first diagnosis: other ranks write their files within a second.
)
REFRESH_S = 2.5  # Interval at which a rank rewrites its file while it hangs.

EventParts = tuple[str, str, dict[str, Any]]  # Kind, text and data of an event.


class HangWatchdog:
    """Watchdog of the steps of one rank, created by its training thread.

    `number` is the folder rank. The writer thread calls `check` about once a second.
    """

    def __init__(self, recorder: Recorder, number: int, stalls: StallDetector) -> None:
        self.hang: Hang | None = None  # The present hang; only the lowest rank that hangs has it.
        self._recorder = recorder
        self._number = number
        self._stalls = stalls
        self._path = recorder.folder / hang_name(number)
        self._training = threading.get_ident()
        self._events: deque[EventParts] = deque()
        self._writing = threading.Lock()
        self._over: threading.Event | None = None  # Ends the thread of the present hang.
        self._is_closed = False

    def check(
        self, run_json: Mapping[str, Any], step: int, gap: StepGap | None
    ) -> list[EventParts]:
        """Begin or end the record of a hang; return the events to record."""
        if self._is_closed or (run_json.get("world_size") or 1) < 2:
            return []
        try:
            note_captures()
            is_hang = gap is not None and gap.is_stall(MIN_HANG_S)
            if gap is not None and is_hang and self._over is None:
                self._begin(run_json, step, gap.seconds)
            elif not is_hang and self._over is not None:
                self._end(self._over)
        except Exception as error:  # it must not end the writer thread
            self._is_closed = True
            log.warning(
                "stepscope: hangs are no longer detected; recording continues", exc_info=error
            )
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self, status: RunStatus) -> None:
        """Stop writing. The record stays, unless the run has finished."""
        self._is_closed = True
        if self._over is not None:
            self._over.set()
            if status is RunStatus.FINISHED:
                self._remove(self._over)

    def _begin(self, run_json: Mapping[str, Any], step: int, silent_s: float) -> None:
        now = clock.now()
        first = HangRecord(
            number=self._number,
            rank=torch_rank(run_json, self._number),
            step=step,
            since=now - silent_s,
            seen=now,
        )
        self._over = threading.Event()
        thread = threading.Thread(
            target=self._work, args=(first, self._over), name="stepscope-hang", daemon=True
        )
        thread.start()

    def _end(self, over: threading.Event) -> None:
        """End the record of a hang, since steps or collectives go on."""
        self._remove(over)
        self._over = None
        if self.hang is not None:
            lasted = format_duration(clock.now() - self.hang.since)
            self._events.append((OVER, f"Steps or collectives go on after {lasted}", {}))
            self.hang = None

    def _remove(self, over: threading.Event) -> None:
        """End the thread without waiting for it, and delete the file."""
        over.set()
        with self._writing:
            self._path.unlink(missing_ok=True)

    def _work(self, first: HangRecord, over: threading.Event) -> None:
        """Write and diagnose the record until `over`, or until this rank enters a collective."""
        record, wait_s = first, FIRST_DIAGNOSIS_S
        try:
            while not over.is_set():
                before, record = record, capture(record, self._training)
                if record.entered_s > first.since:
                    self._stalls.add_collective(ends_gap=before is not first)
                    self._remove(over)
                    return
                with self._writing:
                    if not over.is_set():
                        atomic_write(self._path, json.dumps(asdict(record)), durable=False)
                if not over.wait(wait_s):
                    self._diagnose(over)
                wait_s = REFRESH_S
        except Exception as error:  # noqa: BLE001 - the training hangs, and must not fail for this
            log.warning("stepscope: a hang could not be recorded: %s", first_line(error))

    def _diagnose(self, over: threading.Event) -> None:
        """Diagnose the hang by the files of all ranks, in the lowest rank that hangs."""
        folder = self._recorder.folder
        if any(age_s(folder, number) < FRESH_S for number in range(self._number)):
            return
        try:
            hang = hang_of(read_run(folder))
        except RunError:  # rank 0 starts just now, or its file is malformed
            return
        with self._writing:
            before = self.hang
            if hang is None or over.is_set():
                return
            self.hang = hang
        if before is None or (before.cause, before.ranks) != (hang.cause, hang.ranks):
            self._events.append((FOUND, hang.text, {**asdict(hang), "rank": hang.rank}))
