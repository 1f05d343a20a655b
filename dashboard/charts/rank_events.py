"""Alerts and refused commands of the ranks other than 0, each from its own store."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from dashboard.charts.series import event_json
from stepscope.alerts.settings import NO_STEP
from stepscope.run import RunInfo
from stepscope.run.rank_info import find_rank, numbers_with
from stepscope.store import EventRow, StoreError, StoreReader

ALERT = "alert"
MAX_EVENTS = 100  # newest events of all other ranks
MAX_READ = 1000  # newest events of a rank: epochs must not crowd out alerts

Events = list[dict[str, Any]]


def read_rank_events(run: RunInfo) -> Events:
    """Return the newest alerts and refused commands of the other ranks, oldest first.

    `no_step` alerts are omitted: rank 0 of a hanging job has them too. The ids are text.
    """
    numbers = filter(None, numbers_with(run.folder, "sqlite"))
    found = [event for number in numbers for event in _events(run, number)]
    return sorted(found, key=lambda event: event["t"])[-MAX_EVENTS:]


def unseen(events: Events, seen: str) -> tuple[Events, str]:
    """Return the events, none if their version is `seen`, and their version."""
    version = f"{zlib.crc32(repr([event['id'] for event in events]).encode()):x}"
    return [] if version == seen else events, version


def _events(run: RunInfo, number: int) -> Iterator[dict[str, Any]]:
    try:
        with StoreReader(run.folder, number) as reader:
            rows = [event for event in reader.events(limit=MAX_READ) if _is_shown(event)]
    except StoreError:  # being created, or damaged
        return
    file = find_rank(run.folder, number) if rows else None
    rank = number if file is None else file.rank
    for event in rows:
        shown = event_json(event, run.created)
        shown |= {"id": f"rank{number}-{event.id}", "text": f"Rank {rank}: {event.text}"}
        yield shown | {"data": {**event.data, "rank": rank}}


def _is_shown(event: EventRow) -> bool:
    if event.kind == ALERT:
        return event.data.get("rule") != NO_STEP
    return event.data.get("command_id") is not None and event.data.get("ok") is False
