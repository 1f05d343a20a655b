"""Torch's CUDA caching allocator of this process, read without importing torch or calling CUDA.

Torch is found in `sys.modules`, and nothing is read before the program has started CUDA, so no
context is made here. A read takes about 5 us. It holds the GIL while it waits for the allocator's
lock, so while the allocator waits for the driver or the device, a read stops every Python thread.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepscope.sampling.collectives import Collectives
from stepscope.sampling.parts import Parts

LONG_S = 0.15
"""A step that takes longer is a long one: one and a half ticks of the sampler."""
ABRUPT_S = 1.0
"""Wait for a boundary where steps are short: the thread may be waiting in the allocator."""
BLOCKED_S = 0.05
"""A read that took longer has waited for the allocator's lock and stopped all threads."""
REST = 20
"""Pause after such a read, in multiples of its time: threads are stopped 5 % of the time."""

_PATHS: dict[str, tuple[str, ...]] = {
    "memory/allocated": ("allocated_bytes", "all", "current"),
    "memory/reserved": ("reserved_bytes", "all", "current"),
    "memory/peak_allocated": ("allocated_bytes", "all", "peak"),
    "memory/peak_reserved": ("reserved_bytes", "all", "peak"),
    "memory/active": ("active_bytes", "all", "current"),
    "memory/inactive_split": ("inactive_split_bytes", "all", "current"),
    "memory/alloc_retries": ("num_alloc_retries",),
    "memory/ooms": ("num_ooms",),
}
COUNTS = ("memory/alloc_retries", "memory/ooms")
"""Counters of the whole process, which may have had runs before this one."""


def read(device_index: int) -> dict[str, float]:
    """Return the allocator's counters of CUDA device `device_index`; {} where `reason()` says why.

    Raises RuntimeError (torch's own) for an index that does not exist.
    """
    if reason() is not None:
        return {}
    stats = sys.modules["torch"].cuda.memory_stats_as_nested_dict(device_index)
    values = {key: _follow(stats, path) for key, path in _PATHS.items()}
    return {key: value for key, value in values.items() if value is not None}


class Readings:
    """The counters of one run, read where that stops no other thread; the sampler calls `take`.

    Torch holds the allocator's lock while it gets memory from the driver or gives it back. It is
    the training thread that waits inside torch then, so a read by that thread never waits for the
    lock. It reads at its step boundaries when asked (`wanted`), at most once a tick. The sampler
    itself reads only inside a long step where steps are long, or in a step longer than ABRUPT_S;
    never during one of our own commands; and seldom once it had to wait for the lock (REST). What
    remains: such a read may stop all Python threads while torch holds the lock inside that step.

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
        """The sampler asks for a reading. Every boundary looks at this, and calls `serve`."""
        self._clock = clock
        self._before = _counts()
        self._latest: dict[str, float] = {}
        self._resident = resident
        self._split: dict[str, float] = {}
        """What fills the memory, measured with `_latest` and not taken yet."""
        self._read_at = self._asked_at = self._taken_at = clock()
        self._steps_are_long = True  # until a boundary tells
        self._rests_until = -math.inf
        self._busy = False
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
        self._steps_are_long = now - self._asked_at > LONG_S
        other_s = self.parts.find() + self.collectives.read()
        self._read_now(now + other_s)
        return other_s

    def _read_now(self, now: float) -> None:
        self.wanted, self._rests_until = False, -math.inf
        try:
            self._latest, self._read_at, self._error = self.read(), now, None
        except Exception as error:  # noqa: BLE001 - of torch, and no reason to end a training
            self._error = error
        if self.parts.is_due(now):
            split = self.parts.read(self.index)
            if split and self.index is None and self._resident is not None:
                split["process/rss"] = self._resident()
            self._split = split

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the sampler from reading while the training thread acts on the allocator."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self.serve()

    def take(self) -> dict[str, float]:
        """Return the latest counters, in the sampler's thread, and ask for the next ones.

        {} where the latest are too old: during a command, and at first in a step that takes far
        longer than those before it. Raises the error of the latest reading. What fills the memory
        is returned once, with the counters of the same boundary.
        """
        now = self._clock()
        split, self._split = self._split, {}
        if self.index is None:
            self.wanted = self.wanted or self.parts.is_due(now) or self.collectives.is_due()
            return split
        if not self.wanted:
            self._asked_at, self.wanted = now, True
        elif self._may_read(now):
            self._latest, self._read_at = self.read(), now
            took_s = self._clock() - now
            if took_s > BLOCKED_S:
                self._rests_until = now + REST * took_s
        since_last_s, self._taken_at = now - self._taken_at, now
        if self._error is not None:
            raise self._error
        return self._latest | split if now - self._read_at <= LONG_S + since_last_s else {}

    def _may_read(self, now: float) -> bool:
        patience_s = LONG_S if self._steps_are_long else ABRUPT_S
        rests = self._busy or now < self._rests_until
        return not rests and now - self._asked_at > patience_s


def reason() -> str | None:
    """Say why `read` has nothing to read; None when it has."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch is not imported in this process"
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not hasattr(cuda, "memory_stats_as_nested_dict"):
        return "torch is still being imported"
    if not cuda.is_initialized():
        return "CUDA has not been started in this process"
    return None


def _follow(stats: Any, path: tuple[str, ...]) -> float | None:
    for name in path:
        if name not in stats:
            return None
        stats = stats[name]
    return float(stats)


def _counts() -> dict[int, dict[str, float]]:
    """Return what each device has counted so far; nothing where CUDA has not been started."""
    if reason() is not None:
        return {}
    found = {index: read(index) for index in range(sys.modules["torch"].cuda.device_count())}
    return {
        index: {key: values[key] for key in COUNTS if key in values}
        for index, values in found.items()
    }
