"""Reads this machine's GPUs once a second for all tabs, while the Hardware page is open.

The thread ends IDLE_S after the last request. Ten minutes of readings stay in memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.machine_state import MachineState
from stepscope.gpu.xid import XidWatcher
from stepscope.session.sampler import next_deadline

log = logging.getLogger(__name__)

PERIOD_S = 1.0
IDLE_S = 10.0
STALE_S = 5.0  # age of the newest reading from which the page shows it
KEPT_READINGS = 600  # Ten minutes.
FIRST_TIMEOUT_S = 3.0  # Opening NVML takes some 10 ms; with a failed GPU it may never return.


@dataclass(frozen=True, slots=True)
class MachineReading:
    """The newest view, None before the first; `trouble` is why no newer one exists."""

    view: MachineState | None
    trouble: str | None


@dataclass(frozen=True, slots=True)
class PastReading:
    """Values of each GPU by UUID and metric, at `ts` (epoch seconds)."""

    ts: float
    gpus: Mapping[str, Mapping[str, float]]


class MachinePoller:
    """Thread-safe."""

    def __init__(
        self, machine: MachineMonitor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._view: MachineState | None = None
        self._past: deque[PastReading] = deque(maxlen=KEPT_READINGS)
        self._has_read = False  # since the thread started
        self._error: str | None = None
        self._asked_at = 0.0
        self._read_at = 0.0

    def read(self, wait_s: float = FIRST_TIMEOUT_S) -> MachineReading:
        """Return the newest reading and keep the thread running; waits for its first reading."""
        with self._changed:
            self._asked_at = self._clock()
            if self._thread is None and not self._ending:
                self._has_read = False
                self._thread = threading.Thread(
                    target=self._run, name="stepscope-machine", daemon=True
                )
                self._thread.start()
            self._changed.wait_for(lambda: self._has_read or self._ending, wait_s)
            return MachineReading(self._view, self._error or self._silence())

    def past(self) -> tuple[PastReading, ...]:
        """Return the last readings, the oldest first."""
        return tuple(self._past)

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop the thread; one that is blocked in the driver is left behind after the timeout."""
        with self._changed:
            self._ending = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout_s)

    def _silence(self) -> str | None:
        """Return a message if the driver blocks the thread; else None."""
        if not self._has_read:
            return "The NVIDIA driver does not respond: a GPU may have failed. Check dmesg."
        silent_s = self._clock() - self._read_at
        if silent_s < STALE_S:
            return None
        return f"No response from the NVIDIA driver for {silent_s:.0f} s; the values are old."

    def _run(self) -> None:
        while True:
            self._watch()
            with self._changed:
                if not self._wanted():  # a request may have arrived
                    self._thread = None
                    return

    def _watch(self) -> None:
        deadline = self._clock()
        while self._wait_until(deadline):
            self._poll()
            source = self._machine.source
            if self._machine.xid_watcher is None and source is not None and source.devices():
                self._machine.xid_watcher = XidWatcher(source, self._machine.note_xid)
            deadline = next_deadline(deadline, PERIOD_S, self._clock())
        if self._machine.xid_watcher is not None:
            self._machine.xid_watcher.stop()
            self._machine.xid_watcher = None

    def _wanted(self) -> bool:
        return not self._ending and self._clock() - self._asked_at <= IDLE_S

    def _wait_until(self, deadline: float) -> bool:
        """Wait until the next reading is due; return False once the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending, max(0.0, deadline - self._clock()))
            return self._wanted()

    def _poll(self) -> None:
        view = self._view
        error = None
        try:
            view = self._machine.poll()
            gpus = {device.info.uuid: device.values for device in view.devices}
            self._past.append(PastReading(view.ts, gpus))
        except Exception as failure:  # shown on the page; the next reading may succeed
            error = f"The GPUs could not be read: {type(failure).__name__}: {failure}"
            if self._error is None:
                log.warning("stepscope-machine: reading the GPUs failed", exc_info=True)
        with self._changed:
            self._view = view
            self._error = error
            self._has_read = True
            self._read_at = self._clock()
            self._changed.notify_all()
