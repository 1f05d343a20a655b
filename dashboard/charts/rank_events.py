"""What the ranks other than 0 tell, each in a store of its own: alerts, and results of commands.

The page polls twice a second, and a job may have many ranks: a poll asks some of them, those that
have waited longest, and only for what is new. Each event has a number here, so that a tab is sent
it once.
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
PERIOD_S = 2.0  # How often the store of a rank is asked at most.
BUDGET_S = 0.001
"""Time of a core that a poll may spend here; a store that is open is read to the end."""
KEPT = 100  # Newest events of all other ranks that are kept and sent.
FIRST = 1000  # Newest events of a rank that are looked at first.
RUNS = 16  # Runs of which events are kept.

Numbered = tuple[int, int, EventRow]
"""The number of an event here, its rank in the folder, the event."""


@dataclass(slots=True)
class _RankEventCursor:
    """When a rank was asked, the id of its last event, and torch's number once it is known."""

    asked_at: float = -float("inf")
    last: int = 0
    rank: int | None = None


@dataclass(slots=True)
class _RunEvents:
    """What is known of one run; `name` tells its numbers from those of another server's life."""

    name: str = field(default_factory=lambda: secrets.token_hex(4))
    count: int = 0
    ranks: dict[int, _RankEventCursor] = field(default_factory=dict)
    events: list[Numbered] = field(default_factory=list)
    listed_at: float = -float("inf")


class RankEvents:
    """Reads the events of ranks; may be called by any thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, budget_s: float = BUDGET_S
    ) -> None:
        self._clock = clock
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._runs: OrderedDict[Path, _RunEvents] = OrderedDict()

    def of(self, run: RunInfo, seen: str = "") -> tuple[list[tuple[int, EventRow]], str]:
        """Return the events of the ranks other than 0 that are new to a tab, each with its number
        in the folder, and what the tab has then seen.

        `seen` is what it had, "" for nothing. A job that hangs does so on all ranks: their
        `no_step` is left out, rank 0 has it too.
        """
        if world_size_of(run.run_json) < 2:
            return [], ""
        with self._lock:
            known = recent(self._runs, run.folder, _RunEvents, RUNS)
            self._ask(run.folder, known)
            name, _, count = seen.partition("~")
            after = int(count) if name == known.name and count.isdecimal() else 0
            fresh = [(rank, event) for number, rank, event in known.events if number > after]
            return sorted(fresh, key=lambda each: each[1].ts), f"{known.name}~{known.count}"

    def _ask(self, folder: Path, known: _RunEvents) -> None:
        now, until = self._clock(), time.thread_time() + self._budget_s
        if now - known.listed_at >= PERIOD_S:
            known.listed_at = now
            for number in filter(None, numbers_with(folder, "sqlite")):
                known.ranks.setdefault(number, _RankEventCursor())
        for number, rank in sorted(known.ranks.items(), key=lambda each: each[1].asked_at):
            if now - rank.asked_at < PERIOD_S:
                break
            rank.asked_at = now
            for event in _told(folder, number, rank):
                known.count += 1
                named = _named(_torch_rank(folder, number, rank), event)
                known.events.append((known.count, number, named))
            if time.thread_time() >= until:
                break
        known.events = known.events[-KEPT:]


def _told(folder: Path, number: int, rank: _RankEventCursor) -> Iterator[EventRow]:
    """Give the events of a rank that it has not told before and that a tab is sent."""
    try:
        with StoreReader(folder, number) as reader:
            events = reader.events(rank.last, FIRST)
    except StoreError:
        return  # being made, or broken: what the others say counts
    for event in events:
        rank.last = event.id
        if _is_sent(event):
            yield event


def _is_sent(event: EventRow) -> bool:
    if event.kind == ALERT:
        return event.data.get("rule") != NO_STEP
    return event.data.get("command_id") is not None


def _torch_rank(folder: Path, number: int, rank: _RankEventCursor) -> int:
    """Return torch's number of a rank, its own in the folder while it has no file."""
    if rank.rank is None and (file := find_rank(folder, number)) is not None:
        rank.rank = file.rank
    return number if rank.rank is None else rank.rank


def _named(rank: int, event: EventRow) -> EventRow:
    text = f"Rank {rank}: {event.text}"
    return replace(event, text=text, data={**event.data, "rank": rank})
