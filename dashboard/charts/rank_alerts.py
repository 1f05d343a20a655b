"""The alerts of the ranks other than 0, which each write them into a store of their own.

The page polls twice a second, and a job may have many ranks: their stores are asked now and then,
and only for what is new.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepscope.alerts.rules import NO_STEP
from stepscope.run import RunInfo
from stepscope.store import EventRow, RunReader, StoreError, store_name

KIND = "alert"
PERIOD_S = 2.0
"""How often the stores of a run's ranks are asked at most."""
KEPT = 100
"""Newest alerts of all other ranks that are kept and sent."""
FIRST = 1000
"""Newest events of a rank that are looked at first."""
RUNS = 16
"""Runs of which alerts are kept."""


@dataclass(slots=True)
class _Known:
    """What is known of one run: the id of the last event of each rank, and the alerts."""

    read_at: float
    last: dict[int, int] = field(default_factory=dict)
    alerts: list[tuple[int, EventRow]] = field(default_factory=list)


class RankAlerts:
    """Reads the alerts of ranks; may be called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: OrderedDict[Path, _Known] = OrderedDict()

    def of(self, run: RunInfo) -> list[tuple[int, EventRow]]:
        """Return the newest alerts of the ranks other than 0 with the rank, oldest first.

        A job that hangs does so on all ranks: their `no_step` is left out, rank 0 has it too.
        """
        world_size = run.run_json.get("world_size", 1)
        if not isinstance(world_size, int) or world_size < 2:
            return []
        with self._lock:
            known = self._runs.pop(run.folder, None)
            now = self._clock()
            if known is None or now - known.read_at >= PERIOD_S:
                known = _read(run.folder, known or _Known(now))
                known.read_at = now
            self._runs[run.folder] = known
            while len(self._runs) > RUNS:
                self._runs.popitem(last=False)
            return list(known.alerts)


def _read(folder: Path, known: _Known) -> _Known:
    found = list(known.alerts)
    for path in folder.glob("rank*.sqlite"):
        number = path.stem.removeprefix("rank")
        if not number.isdecimal() or int(number) == 0 or path.name != store_name(int(number)):
            continue
        try:
            with RunReader(folder, int(number)) as reader:
                events = reader.events(known.last.get(int(number), 0), FIRST)
        except StoreError:
            continue  # being made, or broken: what the others say counts
        if events:
            known.last[int(number)] = events[-1].id
        found += [(int(number), _named(int(number), event)) for event in events if _is_one(event)]
    known.alerts = sorted(found, key=lambda alert: alert[1].ts)[-KEPT:]
    return known


def _is_one(event: EventRow) -> bool:
    return event.kind == KIND and event.data.get("rule") != NO_STEP


def _named(rank: int, event: EventRow) -> EventRow:
    text = f"Rank {rank}: {event.text}"
    return replace(event, text=text, data={**event.data, "rank": rank})
