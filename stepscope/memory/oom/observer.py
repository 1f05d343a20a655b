"""Record failed allocations before their error unwinds the stack.

Torch calls its out-of-memory observers between a failed allocation and the throw, in the same
thread, with the allocator's lock released. Stepscope's observer writes `oom.json`, makes no CUDA
call, allocates nothing on the device and never raises. It is not called for an allocation that
succeeds at torch's own second try.

An observer can be attached once CUDA runs, and never detached. So each process has one, attached
by torch itself as the last part of starting CUDA, which passes failures to the current run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from stepscope.common.clock import clock
from stepscope.common.formatting import format_bytes
from stepscope.common.json_values import to_text
from stepscope.host.usage import kills_since
from stepscope.memory import allocator
from stepscope.memory.growth import GrowthTrend
from stepscope.memory.oom import capture
from stepscope.memory.oom.classify import diagnose
from stepscope.memory.oom.record import MemoryKind, OomRecord, OomReport, oom_name
from stepscope.run.folder import write_run_json
from stepscope.run.status import RunOutcome, killed_worker, shortage, with_lost_worker
from stepscope.store.recorder import Recorder

MIN_LEVELS = 4
ALL_UNTIL = 8  # Batches after which only powers of two are read, in 5 us.
MIN_RATE, MAX_RATE = 0.5, 2.0  # Of each part, as a multiple of the mean rate.


class BatchMemory:
    """Levels at some batches of the present pass. Training thread only."""

    def __init__(self) -> None:
        self.number = 0  # Batches since the last `backward()`, of one pass.
        self._place: Any = None
        self._device = 0
        self._levels: list[tuple[int, float]] = []

    def add(self, *place: int) -> None:
        """Count a fetched batch; another `place` starts a new count.

        The first batch is not read: in training each one is the first since a `backward()`.
        """
        if place != self._place:
            self._place, self.number = place, 0
            self._levels.clear()
        self.number += 1
        is_read = self.number <= ALL_UNTIL or not self.number & (self.number - 1)
        if self.number > 1 and is_read and allocator.reason() is None:
            self._device = sys.modules["torch"].cuda.current_device()
            level = allocator.read(self._device).get("memory/allocated")
            if level is not None:
                self._levels.append((self.number, level))

    def trend(self, device: int) -> GrowthTrend | None:
        """Return the growth on a device up to now if each batch has added to it, else None."""
        if len(self._levels) < MIN_LEVELS or device != self._device:
            return None
        (first, lowest), (last, highest) = self._levels[0], self._levels[-1]
        mean = (highest - lowest) / (last - first)
        for (start, low), (end, high) in zip(self._levels, self._levels[1:], strict=False):
            if not MIN_RATE * mean < (high - low) / (end - start) < MAX_RATE * mean:
                return None
        return GrowthTrend(first, self.number, lowest, lowest + mean * (self.number - first))


log = logging.getLogger(__name__)

EVENT_INTERVAL_S = 5.0  # Minimum interval between two events of caught failures.
_UNDESCRIBED = "cannot describe the failed allocation"
_NOT_ATTACHED = "failed allocations are described by their message only"


class OomObserver:
    """The failed allocations of one run, created with its session.

    `step` returns the last completed optimizer step, `growth` the growth of allocated memory.
    `first_kills` is the kernel's kill counter at the start.
    """

    def __init__(
        self,
        recorder: Recorder,
        growth: Callable[[], GrowthTrend | None],
        rank: int = 0,
        first_kills: Any = None,
    ) -> None:
        self.recorder = recorder
        self.step: Callable[[], int] = lambda: recorder.step
        self.first_step = 0
        self.batches = BatchMemory()
        self.trains_on: int | None = None
        self.earlier: Callable[[int], int] = lambda device: 0
        """Returns the memory of earlier optimizers and their models on a device."""
        self.first_kills = first_kills
        self._growth = growth
        self.pending = False  # True after a failure, until the run ends or completes another step.
        self._name = oom_name(rank)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # acquired without blocking: a second thread may fail as well
        self._report: OomReport | None = None
        self._event_at = -EVENT_INTERVAL_S
        self._counted = 0
        self._peak = 0.0  # Bytes: the script may reset torch's peak.

    def attach(self) -> None:
        """Receive failed allocations from the start of CUDA on; call it after torch's import."""
        if self not in _observers:
            _observers.append(self)
        torch = sys.modules.get("torch")
        call_at_start = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
        attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
        if call_at_start is None or attach is None or os.getpid() in _attached:
            return
        _attached.add(os.getpid())

        @_logs_errors(_NOT_ATTACHED)
        def try_to_attach() -> None:
            attach(_on_failed_allocation)

        # Torch keeps it until something starts CUDA, or calls it now if that has happened.
        with _logs_errors(_NOT_ATTACHED):
            call_at_start(try_to_attach)

    def observe(self, values: Mapping[str, float]) -> None:
        """Add the sampler's values, in its thread; attach once torch is imported.

        Attaches nothing once CUDA runs: torch takes the observer without a lock, and the training
        thread may be failing at that moment. The next step attaches it then.
        """
        self._peak = max(self._peak, values.get("memory/peak_allocated", 0.0))
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if self in _observers and not getattr(cuda, "_initialized", True):
            self.attach()

    def add_failed_allocation(self, device: int, requested: int, allowed: int, free: int) -> None:
        """Add a record; the arguments are those of torch's observer, sizes in bytes."""
        if os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return
        try:
            record = self._new_record()
            record.trains_on = self.trains_on
            record.batches = self.batches.trend(device)
            record.retries = capture.count_handled(sys.exc_info()[1])
            capture.add_allocation(record, device, requested, allowed, free)
            with _logs_errors(_UNDESCRIBED):
                record.earlier = self.earlier(device)
            if self.trains_on in (None, device):
                record.growth = self._growth()
                if record.peak_allocated is not None:
                    record.peak_allocated = max(record.peak_allocated, int(self._peak))
            self._add(record)
            self.pending = True
            self._write()
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Count the failures up to now as caught by the script, which completed another step."""
        if not self.pending:
            return
        self.pending = False
        now = time.monotonic()
        if now - self._event_at >= EVENT_INTERVAL_S:
            self._event_at = now
            self._record_event()

    def with_lost_worker(self, error: BaseException, outcome: RunOutcome) -> RunOutcome:
        """Return the outcome as one of host memory if the kernel has killed a worker for it."""
        if outcome.failure != "error" or not killed_worker(error):
            return outcome
        return with_lost_worker(outcome, kills_since(self.first_kills))

    def failed(self, error: BaseException, outcome: RunOutcome) -> OomReport | None:
        """Return the report of the failure that ends the run; None for another failure."""
        if outcome.failure != "oom" or os.getpid() != self._pid:
            self.settle()
            return None
        short = shortage(error)
        memory = MemoryKind.HOST if killed_worker(error) else MemoryKind.GPU
        if short is not None:
            memory = MemoryKind[short.name]
        with _logs_errors(_UNDESCRIBED):
            observed = self.pending and type(error).__name__ == "OutOfMemoryError"
            if observed and self._report is not None and memory is MemoryKind.GPU:
                last = self._report.last
                last.message = to_text(error)[: capture.MAX_MESSAGE_CHARS]
                last.retries = max(last.retries, capture.count_handled(error.__context__))
                self._report = replace(self._report, ended=True)
            else:
                record = self._new_record()
                capture.add_error(record, error, memory, self.first_kills)
                self._add(record, ended=True)
            self.pending = False
            self._write()
        return self._report

    def close(self) -> None:
        """Record the last caught failures; other runs of this process may follow."""
        self.settle()
        self._record_event()
        if self in _observers:
            _observers.remove(self)

    def _new_record(self) -> OomRecord:
        step = self.step()
        return OomRecord(ts=clock.now(), step=step, steps_done=max(0, step - self.first_step))

    def _add(self, record: OomRecord, *, ended: bool = False) -> None:
        seen = 0 if self._report is None else self._report.seen
        self._report = OomReport(last=record, seen=seen + 1, ended=ended)

    def _record_event(self) -> None:
        report = self._report
        if report is None or report.ended or report.seen == self._counted:
            return
        last = report.last
        failures = report.seen - self._counted
        self._counted = report.seen
        times = "" if failures == 1 else f", {failures:,} times"
        size = "" if last.requested is None else f" of {format_bytes(last.requested)}"
        cause = diagnose(last).cause
        self.recorder.event(
            "oom_caught",
            f"An allocation{size} failed and the script went on{times}: {cause}",
            requested=last.requested,
            seen=report.seen,
            case=cause.name.lower(),
            at=last.ts,
        )

    def _write(self) -> None:
        report = self._report
        if report is None:
            return
        try:
            # Not durable: that waits for the disk, and the process is still there.
            write_run_json(self.recorder.folder, asdict(report), self._name, durable=report.ended)
        except (OSError, ValueError) as error:
            log.warning("stepscope: cannot write %s: %s", self._name, error)


_observers: list[OomObserver] = []
_attached: set[int] = set()  # Pids with torch's observer: a forked child has another pid.


@contextlib.contextmanager
def _logs_errors(problem: str) -> Iterator[None]:
    """Log any exception of the block, which would take the place of torch's or the script's."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of torch, such as of an allocator without observers
        log.warning("stepscope: %s (%s)", problem, error)


def _on_failed_allocation(device: int, requested: int, allowed: int, free: int) -> None:
    """Pass a failed allocation to the current run; torch's observer. Never raises."""
    with _logs_errors(_UNDESCRIBED):
        if _observers:
            _observers[-1].add_failed_allocation(device, requested, allowed, free)
