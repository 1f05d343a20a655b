"""Recorder: the interface of a training loop to a run folder for rows, events and commands.

Rows go into a memory-mapped ring, events into a queue; a writer thread moves both into the run
folder. Only the constructor raises; only `close` waits for the disk.

The usual step is one call of `record`, which checks one flag, `needs_boundary`. Any thread sets it
after it has queued its work; the training thread clears it before it checks for work. So no request
is lost.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.common.clock import clock, elapsed
from stepscope.common.json_values import first_line, parse_json, to_json, to_text
from stepscope.common.metrics import Stream
from stepscope.run import RunKind, RunStatus, process_identity
from stepscope.run.rank_info import RUN_VERSION
from stepscope.store.blocks import STEP_TIME, STEPS, Event
from stepscope.store.commands import Command as Command
from stepscope.store.commands import CommandName as CommandName
from stepscope.store.commands import CommandQueue
from stepscope.store.cuda_readback import (
    CudaScalarReadback,
    MetricRow,
    is_gpu_scalar,
    keep_for_good,
)
from stepscope.store.ring import SLOTS, WIDTH, RowLayout
from stepscope.store.writer_thread import FindEvents, TakeRows, WriterThread

log = logging.getLogger(__name__)

MAX_NAME_CHARS = 500  # of a metric
SLURM = {
    "job_id": "SLURM_JOB_ID",
    "array_job_id": "SLURM_ARRAY_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "node_list": "SLURM_JOB_NODELIST",
}
SETTLE_S = 2.0  # timeout for values on a GPU at the end of a run


class Recorder:
    """Records one rank of one run into `folder`; does nothing in a forked child. Thread-safe.

    `on_command` is called with each command in the writer thread, before the loop takes it.
    `ranks` is the number of ranks that share the folder. Raises StoreError or OSError if the folder
    cannot be set up; no later call raises.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        config: Mapping[str, Any] | None = None,
        kind: RunKind = RunKind.TRAINER,
        rank: int = 0,
        on_command: Callable[[Command], None] = lambda _command: None,
        ranks: int = 1,
    ) -> None:
        self._closed = False
        if all(recorder._closed for recorder in list(_open_recorders)):
            clock.restart()  # in a server the wall clock may have been set since its last run
        self.folder = folder
        self.number = rank  # folder rank
        self.step = 0
        self.epoch = 0
        run_json = first_run_json(name, kind, config, rank)
        if ranks > 1:  # the status of a rank killed early depends on it
            run_json["world_size"] = ranks
        self.activity = 0  # rises with work other than steps, such as a validation batch
        self.needs_boundary = False
        """True: the next step has more to do than to record its row."""
        self.commands = CommandQueue(self.request_boundary, on_command)
        """Replaced by the owner before the first step, for a job."""
        self.counts: dict[str, Any] = {}
        """Samples and tokens of the current step by key; see `count`."""
        self._step_began = -math.inf  # the boot time of the last step, or of `restart_clock`
        self._readback: CudaScalarReadback | None = None  # None before the first value on a GPU
        self._readback_lock = threading.RLock()  # a signal handler may come in the middle
        self._refused: set[str] = set()  # metrics whose values are no numbers
        self._writer = WriterThread(
            folder, rank, run_json, progress=self._progress, offer=self._offer
        )
        self.ring = self._writer.ring
        _open_recorders.add(self)

    def record(self, layout: RowLayout, numbers: Iterable[float]) -> bool:
        """Record the next step; return False, without recording, if it needs `log_step`.

        The layout has STEP_TIME before the metrics of `numbers`.
        """
        if self.needs_boundary:
            return False
        now = elapsed()
        step_time = now - self._step_began
        self._step_began = now
        self.step = step = self.step + 1
        ring = self.ring
        if ring.last >= ring.end:
            ring.dropped += 1
            return True
        number, slot = ring.claim()  # as `ring.put`, whose call would add a fifth to the cost
        ring.last = number
        ts = now + clock.offset
        layout.pack(ring.memory, slot, layout.number, ts, step, step_time, *numbers, number + 1)
        return True

    def log_step(self, values: Mapping[str, Any]) -> None:
        """Increment the step and record its metrics, with step time and rates."""
        self.needs_boundary = False  # before the checks for work, which set it
        now = elapsed()
        self.step += 1
        step_time = now - self._step_began
        self._step_began = now
        timed = {} if step_time == math.inf else {STEP_TIME: step_time}  # inf: the first step
        self._record(self.step, now + clock.offset, timed | dict(values))

    def log(self, step: int, values: Mapping[str, Any], ts: float | None = None) -> None:
        """Record a step's metrics; `step` must not decrease.

        Values are numbers, tensors of one element, or None. Never waits for a tensor on a GPU: its
        row is recorded some steps later.
        """
        self.step = step
        self._record(step, clock.now() if ts is None else ts, values)

    def count(self, key: str, number: Any) -> None:
        """Add a number, or a tensor on a GPU, to the samples or tokens of the current step."""
        if number is None:
            return
        try:
            number = number.detach().double() if is_gpu_scalar(number) else float(number)
            self.counts[key] = self.counts.get(key, 0.0) + number
        except Exception as error:  # noqa: BLE001 - of the script, which may raise anything
            self._refuse(key, error)

    def take_counts(self) -> dict[str, Any]:
        """Return and reset the counts of the current step."""
        taken, self.counts = self.counts, {}
        return taken

    def restart_clock(self) -> None:
        """Exclude the time since the last step, such as a pause, from the step time."""
        self._step_began = elapsed()

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for pending tensors and record their rows; after `timeout_s`, without values."""
        if self._readback is None or not self._readback_lock.acquire(timeout=timeout_s or -1):
            return
        try:
            self._readback.flush(timeout_s)
        finally:
            self._readback_lock.release()

    def sample(self, values: Mapping[str, float], gpu: str = "") -> None:
        """Record one sample of a GPU (its UUID), or of process, host and allocator."""
        if self.ring.waiting() > SLOTS // 2:  # on a full disk the rest is for steps
            self.ring.dropped += 1
        elif not self._closed:
            stream = Stream.DEVICES if gpu else Stream.SAMPLES
            self._put_row(self.step, clock.now(), values, (stream, gpu))

    def event(self, kind: str, text: str, /, **data: Any) -> None:
        """Add an event; `data` is converted to JSON."""
        kept = {name: to_json(value) for name, value in data.items()}
        if not self._closed:
            epoch = self.epoch
            self._writer.put(
                Event(clock.now(), self.step, epoch, to_text(kind), to_text(text), kept)
            )
            self._writer.wake()

    def describe(self, **run_json: Any) -> None:
        """Add entries to run.json, such as total_steps; does nothing after `close`."""
        with self._writer.run_json_lock:
            if not self._closed:
                self._describe(run_json)
        self._writer.wake()

    def request_boundary(self) -> None:
        """Make the next step serve commands, the sampler and profiles. Thread-safe."""
        self.needs_boundary = True

    def finish(self, command: Command, text: str, *, ok: bool = True, **data: Any) -> None:
        """Add the event of an executed or refused command; `data` such as before={...}."""
        self.event(command.name, text, **{"ok": ok, "command_id": command.id, **data})

    def observe(self, take_rows: TakeRows, find_events: FindEvents) -> None:
        """Register the observer, which the writer thread calls."""
        self._writer.observer = take_rows, find_events

    @property
    def run_json(self) -> Mapping[str, Any]:
        """Content of run.json; other threads may change it."""
        return self._writer.run_json

    def set_status(self, status: RunStatus, reason: str | None = None) -> None:
        """Set the run's status; `reason` is one sentence for the page."""
        self.describe(status=status, reason=reason)

    def close(self, status: RunStatus, reason: str | None = None, timeout_s: float = 4.0) -> None:
        """Write the pending rows and the final status; idempotent."""
        if not self._closed:
            self.commands.close()
        with self._writer.run_json_lock:  # other threads' entries come before, or are dropped
            if self._closed:
                return
            self._closed = True
        self.needs_boundary = True
        self.settle(SETTLE_S)  # a hanging GPU must not block the exit
        with self._writer.run_json_lock:
            self._describe({"status": status, "reason": reason, "ended": clock.now()})
        self._writer.close(timeout_s)
        self._writer.observer = None

    def leave(self) -> None:
        """Detach a forked child from the parent's files."""
        self._closed = True
        self.needs_boundary = True
        keep_for_good(self._readback)  # its memory on a GPU belongs to the parent
        self._readback = None
        self.commands.abandon()
        self._writer.leave()

    def _describe(self, run_json: Mapping[str, Any]) -> None:
        self._writer.run_json.update({name: to_json(value) for name, value in run_json.items()})

    def _record(self, step: int, ts: float, values: Mapping[str, Any]) -> None:
        """Put a row into the ring, now or when its tensors on a GPU have been copied."""
        if self._closed:
            self.needs_boundary = True
            return
        row: MetricRow = {}
        tensors: dict[str, Any] = {}
        for key, value in values.items():
            if type(key) is not str or not key.isascii() or len(key) > MAX_NAME_CHARS:
                key = to_text(key)[:MAX_NAME_CHARS]
            if type(value) is float:
                row[key] = value
            elif value is not None:
                try:
                    if is_gpu_scalar(value):
                        tensors[key] = value
                    else:
                        row[key] = float(value.item() if hasattr(value, "item") else value)
                except Exception as error:  # noqa: BLE001 - of the script, which may raise anything
                    self._refuse(key, error)
        if tensors or self._readback:
            self._read_back(step, ts, row, tensors)
        else:
            self._put_row(step, ts, row)
        if self._readback or self.commands.waiting:
            self.needs_boundary = True

    def _read_back(self, step: int, ts: float, row: MetricRow, tensors: dict[str, Any]) -> None:
        """Put the rows whose values have arrived, and queue the copies of this row."""
        with self._readback_lock:
            if self._readback is None:
                self._readback = CudaScalarReadback(self._put_row)
            self._readback.poll()
            self._readback.put(step, ts, row, tensors)

    def _put_row(
        self, step: int, ts: float, row: Mapping[str, Any], series: tuple[str, str] = STEPS
    ) -> None:
        """Put a row of numbers into the ring: several slots for a wide row."""
        keys = tuple(row)
        for start in range(0, len(keys), WIDTH):
            part = keys[start : start + WIDTH]
            layout = self.ring.layout((*series, *part))
            if layout is None:
                self.ring.dropped += 1
                self._refuse(", ".join(part), ValueError("too many different names"))
            else:
                self.ring.put(layout, ts, step, *[row[key] for key in part])

    def _refuse(self, key: str, error: Exception) -> None:
        """Log once that values of a metric cannot be recorded."""
        if key not in self._refused:
            self._refused.add(key)
            log.warning(
                "stepscope: %s: must be a number or a tensor of one element (%s); omitted from now "
                "on, without another warning",
                key[:100],
                first_line(error),
            )

    def _progress(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch}

    def _offer(self, command_id: int, name: str, args: str) -> None:
        try:
            command = Command(command_id, CommandName(name), dict(parse_json(args)))
        except (ValueError, TypeError) as error:
            log.warning("stepscope: %.100s is not a command: %s", name, first_line(error))
            return
        self.commands.offer(command)


_open_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _leave_all() -> None:
    for recorder in list(_open_recorders):
        recorder.leave()


os.register_at_fork(after_in_child=_leave_all)


def first_run_json(
    name: str, kind: RunKind, config: Mapping[str, Any] | None, rank: int
) -> dict[str, Any]:
    """Return run.json before the first step."""
    slurm = {name: os.environ[given] for name, given in SLURM.items() if given in os.environ}
    now = clock.now()
    return {
        "schema": RUN_VERSION,
        "name": name,
        "kind": kind,
        "created": now,
        "status": RunStatus.PENDING,
        "reason": None,
        "heartbeat": now,
        "problem": None,
        "config": to_json(config or {}),
        "rank": rank,
        "step": 0,
        "epoch": 0,
        "dropped": 0,
        **process_identity(),
    } | ({"slurm": slurm} if slurm else {})
