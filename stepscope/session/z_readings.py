"""Carved from stepscope/memory/allocator.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepscope.distributed.collective_metrics import Collectives
from stepscope.memory.allocator import REPEATED_S, counts_by_device, read
from stepscope.memory.model_states import Parts


class Readings:
    """The counters of one run, read by the training thread and returned to the sampler by `take`.

    Torch holds the allocator's lock while it gets memory from the driver or gives it back, which
    takes long where the driver is stuck. It is the training thread that waits inside torch then,
    so a read by that thread never waits for the lock; one by another thread would, and would stop
    all Python threads meanwhile. So the training thread reads when asked (`wanted`), at most once
    a tick: at its step boundaries (`serve`) and between the phases of a step (`look`). Inside a
    phase the latest reading is repeated, for REPEATED_S at most.

    `index` is the CUDA index whose allocator to read, None for a run without CUDA or before it is
    known. Make it in the training thread: retries and failures of allocations count from then on.

    About once a second a boundary also measures `parts`, and where there is no allocator the
    `resident` bytes of this process, so that both are of one moment. In a job of several processes
    it also reads its `collectives`, every 1 to 64 s.
    """

    def __init__(
        self,
        index: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], float] | None = None,
    ) -> None:
        self.index: int | None = None
        self.parts = Parts(clock=clock)
        self.collectives = Collectives(clock=clock)
        self.wanted = False
        """The sampler asks for a reading. Every boundary checks this, and calls `serve`."""
        self._clock = clock
        self._before = counts_by_device()
        self._latest: dict[str, float] = {}
        self._resident = resident
        self._split: dict[str, float] = {}
        """What fills the memory, measured with `_latest` and not taken yet."""
        self._read_at = self._asked_at = clock()
        self._error: Exception | None = None
        self.begin(index)

    def begin(self, index: int | None) -> None:
        """Read this device from now on; in the training thread."""
        self.index = index
        self._read_now(self._clock())

    def read(self) -> dict[str, float]:
        """Read now, in the training thread; {} where `reason()` says why."""
        index = self.index
        if index is None:
            return {}
        values, before = read(index), self._before.get(index, {})
        for key, base in before.items():
            if values.get(key, base) < base:  # the script has set torch's counters back
                before[key] = 0.0
        return {key: value - before.get(key, 0.0) for key, value in values.items()}

    def serve(self) -> float:
        """Read for the sampler, in the training thread, at a boundary; `take` raises its errors.

        Return the seconds of a search for optimizers and of reading the collectives, 0.0 where
        there was neither: they are no step time.
        """
        now = self._clock()
        other_s = self.parts.find() + self.collectives.read()
        self._read_now(now + other_s)
        return other_s

    def look(self) -> None:
        """Read the counters if the sampler still waits for them, in the training thread."""
        if self.wanted and self._read_at < self._asked_at:
            self._read_counters(self._clock())

    def _read_now(self, now: float) -> None:
        self.wanted = False
        self._read_counters(now)
        if self.parts.is_due(now):
            split = self.parts.read(self.index)
            if split and self.index is None and self._resident is not None:
                split["process/rss"] = self._resident()
            self._split = split

    def _read_counters(self, now: float) -> None:
        try:
            self._latest, self._read_at, self._error = self.read(), now, None
        except Exception as error:  # noqa: BLE001 - of torch, and no reason to end a training
            self._error = error

    @contextmanager
    def then_read(self) -> Iterator[None]:
        """Read at once after what the training thread does to the allocator within."""
        try:
            yield
        finally:
            self.serve()

    def take(self) -> dict[str, float]:
        """Return the latest counters, in the sampler's thread, and ask for the next ones.

        {} where the latest are too old. Raises the error of the latest reading. What fills the
        memory is returned once, with the counters of the same boundary.
        """
        now = self._clock()
        split, self._split = self._split, {}
        if self.index is None:
            self.wanted = self.wanted or self.parts.is_due(now) or self.collectives.is_due()
            return split
        if self._asked_at <= self._read_at:
            self._asked_at = now
        self.wanted = True
        if self._error is not None:
            raise self._error
        return self._latest | split if now - self._read_at <= REPEATED_S else {}
