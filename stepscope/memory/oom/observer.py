"""Record failed allocations before their error unwinds the stack.

Torch calls its observers between a failed allocation and the throw, in the same thread, with the
allocator's lock released. Ours makes a record (`capture.py`) and writes `oom.json`. It makes no
CUDA call, allocates nothing on the device and never raises. It is not called for an allocation
that succeeds at torch's own second try.

An observer can be attached once CUDA runs, and never detached. So each process has one, attached
by torch itself as the last part of starting CUDA, which passes failures on to the present run.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepscope.common.formatting import format_bytes
from stepscope.common.json_values import to_text
from stepscope.host.usage import kills_since
from stepscope.memory.oom import capture
from stepscope.memory.oom.classify import judge
from stepscope.memory.oom.record import MemoryKind, OomRecord, OomReport, oom_name
from stepscope.recorder.recorder import Recorder
from stepscope.run.folder import write_run_json
from stepscope.run.status import RunOutcome, killed_worker, shortage, with_lost_worker

log = logging.getLogger(__name__)

WHOLE_EVERY_S = 1.0
"""Minimum time between two whole records: a script may look for its batch size by failing."""
EVENT_EVERY_S = 5.0  # Minimum time between two events of caught failures.
_SLOW = ("own", "others", "others_reason", "processes", "readings")
"""Fields that the next record takes over if it is not a whole one."""


class OomObserver(capture.FailureContext):
    """The failed allocations of one run; made with its session."""

    def __init__(self, recorder: Recorder, rank: int = 0, first_kills: Any = None) -> None:
        super().__init__(recorder=recorder, step=lambda: recorder.step, first_kills=first_kills)
        self.pending = False
        """True after a failure, until the run ends or makes another step."""
        self._name = oom_name(rank)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # taken without waiting: a second thread may fail as well
        self._report: OomReport | None = None
        self._whole_at = self._event_at = -EVENT_EVERY_S
        self._unwritten = False
        self._counted = 0

    def attach(self) -> None:
        """Receive failed allocations from the start of CUDA on.

        Starts nothing itself. Does nothing before torch is imported: call it again then.
        """
        _observe(self)

    def look_for_torch(self, values: Mapping[str, float] | None = None) -> None:
        """Attach once torch is imported; called by the sampler's thread with its `values`.

        Does nothing once CUDA runs: torch takes the observer without a lock, and the training
        thread may be failing at that moment. The next step attaches it then.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if self in _watches and not getattr(cuda, "_initialized", True):
            _observe(self)

    def captured(self, device: int, requested: int, allowed: int, free: int) -> None:
        """Take a record; the arguments are those of torch's observer, sizes in bytes."""
        if os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return
        try:
            whole = time.monotonic() - self._whole_at >= WHOLE_EVERY_S
            record = capture.at_allocation(self, device, requested, allowed, free, whole)
            if whole:
                self._whole_at = time.monotonic()
            elif self._report is not None:
                last = self._report.last
                record = replace(record, **{name: getattr(last, name) for name in _SLOW})
            self._keep(record)
            self.pending = True
            if whole:
                self._write()
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Count the failures up to now as caught by the script: it has made another step."""
        if not self.pending:
            return
        self.pending = False
        self._write()
        now = time.monotonic()
        if now - self._event_at >= EVENT_EVERY_S:
            self._event_at = now
            self._add_event()

    def with_lost_worker(self, error: BaseException, outcome: RunOutcome) -> RunOutcome:
        """Return the outcome as one of host memory if the kernel has killed a worker for it."""
        if outcome.failure != "error" or not killed_worker(error):
            return outcome
        return with_lost_worker(outcome, kills_since(self.first_kills))

    def failed(self, error: BaseException, outcome: RunOutcome) -> OomReport | None:
        """Return the report of the failure that ends the run, None if it is not one of memory."""
        if outcome.failure != "oom" or os.getpid() != self._pid:
            self.settle()
            return None
        short = shortage(error)
        memory = MemoryKind.HOST if killed_worker(error) else MemoryKind.GPU
        if short is not None:
            memory = MemoryKind[short.name]
        try:
            observed = self.pending and type(error).__name__ == "OutOfMemoryError"
            if observed and self._report is not None and memory is MemoryKind.GPU:
                last = replace(self._report.last, message=to_text(error)[: capture.MESSAGE])
                self._report = replace(self._report, last=last, ended=True)
                self._unwritten = True
            else:
                self._keep(capture.at_error(self, error, memory), ended=True)
            self.pending = False
            self._write()
        except Exception as problem:  # noqa: BLE001 - it must not take the place of the script's
            log.warning("stepscope: cannot describe the failed allocation: %s", problem)
        return self._report

    def close(self) -> None:
        """Write the rest; other runs of this process may follow."""
        self.settle()
        report = self._report
        if report is not None and not report.ended and report.seen > self._counted:
            self._add_event()
        self._write()
        if self in _watches:
            _watches.remove(self)

    def _keep(self, record: OomRecord, *, ended: bool = False) -> None:
        former = self._report or OomReport(first=record, last=record, seen=0)
        self._report = replace(former, last=record, seen=former.seen + 1, ended=ended)
        self._unwritten = True

    def _add_event(self) -> None:
        """Mark caught failures on the charts."""
        report = self._report
        if report is None:
            return
        last, more = report.last, report.seen - self._counted
        self._counted = report.seen
        times = "" if more == 1 else f", {more:,} times"
        asked = "" if last.requested is None else f" of {format_bytes(last.requested)}"
        case = judge(last).case
        self.recorder.event(
            "oom_caught",
            f"An allocation{asked} failed and the script went on{times}: {case}",
            requested=last.requested,
            seen=report.seen,
            case=case.name.lower(),
            at=last.ts,
        )

    def _write(self) -> None:
        report = self._report
        if report is None or not self._unwritten:
            return
        try:
            # Not durable: that waits for the disk, and the process is still there.
            write_run_json(self.recorder.folder, report.to_json(), self._name, durable=report.ended)
            self._unwritten = False
        except (OSError, ValueError) as error:
            log.warning("stepscope: cannot write %s: %s", self._name, error)


_watches: list[OomObserver] = []
_attached: set[int] = set()
"""The process that the observer is attached in: a forked child has another number."""


def _observe(watch: OomObserver) -> None:
    if watch not in _watches:
        _watches.append(watch)
    torch = sys.modules.get("torch")
    later = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
    if later is None or attach is None or os.getpid() in _attached:
        return
    _attached.add(os.getpid())

    def try_to_attach() -> None:
        try:
            attach(_called)
        except Exception as error:  # noqa: BLE001 - such as of an allocator without observers
            _not_attached(error)

    try:
        # Torch keeps it until something starts CUDA, or calls it now if that has happened.
        later(try_to_attach)
    except Exception as error:  # noqa: BLE001 - another torch; the training has to run
        _not_attached(error)


def _not_attached(error: Exception) -> None:
    log.warning("stepscope: failed allocations are described by their message only (%s)", error)


def _called(device: int, requested: int, allowed: int, free: int) -> None:
    """Torch's observer. Raises nothing of ours: an exception would take the place of torch's."""
    try:
        if _watches:
            _watches[-1].captured(device, requested, allowed, free)
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("stepscope: cannot describe the failed allocation: %s", error)
