"""Captures what there is to know when memory runs out, before the error unwinds the stack.

Torch calls its observers between a failed allocation and the throw, in the thread that asked, with
the allocator's lock released. Ours reads counters, segments, the stack and who else is on the
device, and writes `oom.json`. It makes no CUDA call, allocates nothing on the device and never
raises. An allocation that succeeds at torch's own second try is none of this: nobody is called.

An observer can be attached once CUDA runs, and never detached. So there is one a process, attached
by torch itself as the last part of starting CUDA, which hands on to the run that there is.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stepscope.common.formatting import format_bytes
from stepscope.host.usage import kills_since
from stepscope.memory.oom import capture as made
from stepscope.memory.oom.classify import judge
from stepscope.memory.oom.record import MemoryKind, OomRecord, OomReport, oom_name
from stepscope.recorder.recorder import Recorder
from stepscope.run.folder import write_run_json
from stepscope.run.status import (
    MemoryShortage,
    RunOutcome,
    killed_worker,
    shortage,
    with_lost_worker,
)

log = logging.getLogger(__name__)

WHOLE_EVERY_S = 1.0
"""Least time between two whole records: a script may look for its batch size by failing."""
EVENT_EVERY_S = 5.0
"""Least time between two events of caught failures."""


class OomObserver:
    """What one run knows of its failed allocations; made with its session.

    `step` returns the last optimizer step that ended, and `own_parts` names the part of a step by
    the end of a file's path, for a loop that is not of torch's classes.
    """

    def __init__(self, recorder: Recorder, rank: int = 0, first_kills: Any = None) -> None:
        self.step: Callable[[], int] = lambda: recorder.step
        self.first_step = 0
        self.own_parts: Mapping[str, str] = {}
        self.mode_at_steps: Callable[[Any], bool | None] = lambda model: None
        """Says whether a model was in training mode when steps ended; None where not known."""
        self.first_kills = first_kills
        """What run.json has of the kernel's counter of kills at the start."""
        self.pending = False
        """A failure that neither ended the run yet nor was followed by another step."""
        self._recorder = recorder
        self._name = oom_name(rank)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # taken without waiting: a second thread may fail as well
        self._report: OomReport | None = None
        self._whole_at = self._told_at = -EVENT_EVERY_S
        self._unwritten = False
        self._told = 0

    def attach(self) -> None:
        """Be called at failed allocations, from the moment on in which torch has started CUDA.

        Starts nothing itself. Does nothing before torch is imported: call it again then.
        """
        _observe(self)

    def look_for_torch(self, values: Mapping[str, float] | None = None) -> None:
        """Be attached once torch is imported, in the sampler's thread at its ticks (`values`).

        Not where CUDA runs already: torch takes the observer without a lock, and the training
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
            now = time.monotonic()
            whole = now - self._whole_at >= WHOLE_EVERY_S
            record = made.at_allocation(self._facts(), device, requested, allowed, free, whole)
            if whole:
                self._whole_at = time.monotonic()
            elif self._report is not None:
                record = made.with_former(record, self._report.last)
            self._keep(record)
            self.pending = True
            if whole:
                self._write()
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Say that the script has caught the failures up to now: it has made another step."""
        if not self.pending:
            return
        self.pending = False
        self._write_if_due()
        report, now = self._report, time.monotonic()
        if report is None or now - self._told_at < EVENT_EVERY_S:
            return
        self._told_at = now
        self._tell(report)

    def with_lost_worker(self, error: BaseException, outcome: RunOutcome) -> RunOutcome:
        """Return the outcome as one of host memory if the kernel has killed a worker for it."""
        if outcome.failure != "error" or not killed_worker(error):
            return outcome
        return with_lost_worker(outcome, kills_since(self.first_kills))

    def failed(self, error: BaseException, outcome: RunOutcome) -> OomReport | None:
        """Return what is known of the failure that ends the run, if it is one of memory."""
        short = shortage(error)
        if outcome.failure != "oom" or os.getpid() != self._pid:
            self.settle()
            return None
        memory = _memory(short, error)
        try:
            observed = self.pending and type(error).__name__ == "OutOfMemoryError"
            if observed and self._report is not None and memory is MemoryKind.GPU:
                said = made.first_words(error)
                self._report = replace(
                    self._report, last=replace(self._report.last, message=said), ended=True
                )
            else:
                self._keep(made.at_error(self._facts(), error, memory), ended=True)
            self.pending = False
            self._write()
        except Exception as problem:  # noqa: BLE001 - it must not take the place of the script's
            log.warning("stepscope: the failed allocation could not be described: %s", problem)
        return self._report

    def close(self) -> None:
        """Keep what is not written yet; other runs of this process may follow."""
        self.settle()
        report = self._report
        if report is not None and not report.ended and report.seen > self._told:
            self._tell(report)
        self._write_if_due()
        _forget(self)

    def _facts(self) -> made.OomContext:
        step = self.step()
        return made.OomContext(
            recorder=self._recorder,
            step=step,
            steps_done=max(0, step - self.first_step),
            own_parts=self.own_parts,
            mode_at_steps=self.mode_at_steps,
            first_kills=self.first_kills,
        )

    def _keep(self, record: OomRecord, *, ended: bool = False) -> None:
        former = self._report
        if former is None:
            self._report = OomReport(first=record, last=record, ended=ended)
        else:
            self._report = replace(former, last=record, seen=former.seen + 1, ended=ended)
        self._unwritten = True

    def _tell(self, report: OomReport) -> None:
        """Mark caught failures on the charts."""
        last, more = report.last, report.seen - self._told
        self._told = report.seen
        times = "" if more == 1 else f", {more:,} times"
        asked = "" if last.requested is None else f" of {format_bytes(last.requested)}"
        verdict = judge(last)
        self._recorder.event(
            "oom_caught",
            f"An allocation{asked} failed and the script went on{times}: {verdict.case}",
            requested=last.requested,
            seen=report.seen,
            case=verdict.case.name.lower(),
            at=last.ts,
        )

    def _write_if_due(self) -> None:
        if self._unwritten:
            self._write()

    def _write(self) -> None:
        report = self._report
        if report is None:
            return
        try:
            # Not durable: that waits for the disk, and the process is still there.
            write_run_json(
                self._recorder.folder, report.to_json(), self._name, durable=report.ended
            )
            self._unwritten = False
        except (OSError, ValueError) as error:
            log.warning("stepscope: %s could not be written: %s", self._name, error)


_MEMORY = {
    MemoryShortage.GPU: MemoryKind.GPU,
    MemoryShortage.HOST: MemoryKind.HOST,
    MemoryShortage.PINNED: MemoryKind.PINNED,
}


def _memory(short: MemoryShortage | None, error: BaseException) -> MemoryKind:
    """Return which memory was too small; an outcome may know more than the error's own words."""
    if short is None:
        return MemoryKind.HOST if killed_worker(error) else MemoryKind.GPU
    return _MEMORY[short]


_watches: list[OomObserver] = []
_attached: set[int] = set()
"""The process that the observer is attached in: a forked child has another number."""


def _observe(watch: OomObserver) -> None:
    if watch not in _watches:
        _watches.append(watch)
    torch = sys.modules.get("torch")
    later = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    offered = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
    if later is None or offered is None or os.getpid() in _attached:
        return
    _attached.add(os.getpid())
    try:
        # Torch keeps it until something starts CUDA, or calls it now where that has happened.
        later(lambda: _attach(offered))
    except Exception as error:  # noqa: BLE001 - another torch; the training has to run
        _not_attached(error)


def _attach(attach: Callable[[Callable[..., None]], None]) -> None:
    try:
        attach(_called)
    except Exception as error:  # noqa: BLE001 - such as of an allocator that has no observers
        _not_attached(error)


def _not_attached(error: Exception) -> None:
    log.warning("stepscope: a failed allocation will be told by its message only (%s)", error)


def _forget(watch: OomObserver) -> None:
    if watch in _watches:
        _watches.remove(watch)


def _called(device: int, requested: int, allowed: int, free: int) -> None:
    """Torch's observer. Raises nothing of ours: an exception would take the place of torch's."""
    try:
        if _watches:
            _watches[-1].captured(device, requested, allowed, free)
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("stepscope: a failed allocation could not be described: %s", error)
