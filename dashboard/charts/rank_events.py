"""Alerts and command results of the ranks other than 0, each from its own store.

The page polls twice a second and a job may have many ranks: a poll reads the new events of some
ranks, the longest unread first. Events are numbered, so that a tab receives each once.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from dashboard.charts.run_view import world_size_of
from dashboard.run_look import recent
from stepscope.alerts.rules import NO_STEP
from stepscope.run import RunInfo
from stepscope.run.rank_info import find_rank, numbers_with
from stepscope.store import EventRow, StoreError, StoreReader

ALERT = "alert"
PERIOD_S = 2.0  # between two readings of a rank's store
BUDGET_S = 0.001  # CPU time of a poll; an open store is read to the end
MAX_EVENTS = 100  # newest events of all other ranks
MAX_FIRST_EVENTS = 1000  # newest events of a rank at its first reading
MAX_RUNS = 16


@dataclass(slots=True)
class _RankEventCursor:
    """Time of the last reading, the id of the last event, the global rank once known."""

    read_at: float = -float("inf")
    last: int = 0
    rank: int | None = None


@dataclass(slots=True)
class _RunEvents:
    """Events of one run: (number, folder rank, event). `name` distinguishes server processes."""

    name: str = field(default_factory=lambda: secrets.token_hex(4))
    count: int = 0
    ranks: dict[int, _RankEventCursor] = field(default_factory=dict)
    events: list[tuple[int, int, EventRow]] = field(default_factory=list)
    listed_at: float = -float("inf")


class RankEvents:
    """Reads the events of ranks. Thread-safe."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, budget_s: float = BUDGET_S
    ) -> None:
        self._clock = clock
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._runs: OrderedDict[Path, _RunEvents] = OrderedDict()

    def of(self, run: RunInfo, seen: str = "") -> tuple[list[tuple[int, EventRow]], str]:
        """Return (folder rank, event) of the events new to a tab, and the tab's next `seen`.

        `seen` is "" at first. `no_step` alerts are omitted: rank 0 of a hanging job has them too.
        """
        if world_size_of(run.run_json) < 2:
            return [], ""
        with self._lock:
            known = recent(self._runs, run.folder, _RunEvents, MAX_RUNS)
            self._read(run.folder, known)
            name, _, count = seen.partition("~")
            after = int(count) if name == known.name and count.isdecimal() else 0
            fresh = [(rank, event) for number, rank, event in known.events if number > after]
            return sorted(fresh, key=lambda each: each[1].ts), f"{known.name}~{known.count}"

    def _read(self, folder: Path, known: _RunEvents) -> None:
        now, until = self._clock(), time.thread_time() + self._budget_s
        if now - known.listed_at >= PERIOD_S:
            known.listed_at = now
            for number in filter(None, numbers_with(folder, "sqlite")):
                known.ranks.setdefault(number, _RankEventCursor())
        for number, rank in sorted(known.ranks.items(), key=lambda each: each[1].read_at):
            if now - rank.read_at < PERIOD_S:
                break
            rank.read_at = now
            for event in _new_events(folder, number, rank):
                known.count += 1
                known.events.append((known.count, number, event))
            if time.thread_time() >= until:
                break
        known.events = known.events[-MAX_EVENTS:]


def _new_events(folder: Path, number: int, rank: _RankEventCursor) -> Iterator[EventRow]:
    """Yield the unread alerts and command results of a rank, with its global rank."""
    try:
        with StoreReader(folder, number) as reader:
            events = reader.events(rank.last, MAX_FIRST_EVENTS)
    except StoreError:  # being created, or damaged
        return
    for event in events:
        rank.last = event.id
        is_alert = event.kind == ALERT and event.data.get("rule") != NO_STEP
        if is_alert or (event.kind != ALERT and event.data.get("command_id") is not None):
            if rank.rank is None and (file := find_rank(folder, number)) is not None:
                rank.rank = file.rank
            shown = number if rank.rank is None else rank.rank
            text, data = f"Rank {shown}: {event.text}", {**event.data, "rank": shown}
            yield replace(event, text=text, data=data)
