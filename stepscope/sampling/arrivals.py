"""When this rank entered the collectives that all ranks take part in, kept where others read it.

For jobs without DistributedDataParallel, whose log tells waiting from computing: with gloo a rank
that waits stands in the collective, so who entered it last was waited for. With NCCL the host only
queues a collective and runs ahead, and the times tell nothing.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from stepscope.common.files import atomic_write
from stepscope.sampling.flight_recorder import FlightRecord

KEPT = 4096
"""Newest collectives that are kept: 100 kB, written where the Flight Recorder has been read."""
BLOCKING = "gloo"


class Arrivals:
    """The newest collectives of one rank; `note` in the training thread, `write` in another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = -1
        self._found: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._is_new = False

    def note(self, record: FlightRecord) -> None:
        """Keep what is new in the largest group, the one that all ranks are in."""
        groups = record.groups
        largest = max(groups, key=lambda name: len(groups[name]), default=None)
        for one in record.collectives:
            if (
                one.group == largest
                and one.backend == BLOCKING
                and one.sequence is not None
                and one.sequence > self._last
            ):
                self._last = one.sequence
                self._found.append((one.sequence, one.created_s))
                self._is_new = True

    def write(self, _values: object = None) -> None:
        """Write the file where there is something new; told at each tick. Raises OSError."""
        if not self._is_new:
            return
        self._is_new = False
        found = list(self._found)
        told = {"sequence": [number for number, _ in found], "s": [s for _, s in found]}
        atomic_write(self._path, json.dumps(told), durable=False)
