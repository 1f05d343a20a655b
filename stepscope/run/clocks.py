"""How far the clocks of two hosts are apart, from the order of writing and reading files.

Who reads a file reads it after it was written. So the time that its writer put into it, less the
reader's time, is at most the difference of their clocks: a bound that holds on any disk, however
late it shows what was written. A bound from each side makes an interval; the difference lies in it.
Times that the disk stamps on files are no help: many network disks take them from the writer.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.common.files import read_json
from stepscope.run.folder import write_run_json

WINDOW_S = 300.0
"""Age up to which a bound counts: clocks drift."""
_BYTES_LIMIT = 2**20
_MOST_S = 2.0**32
"""No clock is set by more: one without a battery begins in 1970."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A host's clock less that of number 0's host, in seconds; it is true to `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float


class Bounds:
    """The best lower bound of another clock less one's own, of the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._newest: deque[tuple[float, float]] = deque()
        """Times of reading, and bounds that fall: older ones that are no better are left out."""

    def add(self, sent: float, now: float) -> None:
        """Take in that a file with the other's time `sent` was read at one's own time `now`."""
        bound = sent - now
        while self._newest and self._newest[-1][1] <= bound:
            self._newest.pop()
        self._newest.append((now, bound))
        while self._newest[0][0] < now - WINDOW_S:
            self._newest.popleft()

    def clear(self) -> None:
        """Forget all: a clock was set."""
        self._newest.clear()

    @property
    def best(self) -> float | None:
        """The highest bound; None before the first."""
        return self._newest[0][1] if self._newest else None


def offset_between(theirs_less_mine: float | None, mine_less_theirs: float | None) -> ClockOffset:
    """Return one's own clock less the other's, from the lower bound that each side has found.

    `theirs_less_mine` is what this host has found, `mine_less_theirs` what the other one has.
    Raises ValueError where one is missing, or where both cannot be true: a clock was set meanwhile.
    """
    if theirs_less_mine is None or mine_less_theirs is None:
        raise ValueError("each host has to have read the other's file")
    low, high = mine_less_theirs, -theirs_less_mine
    if low > high:
        raise ValueError("a clock was set")
    return ClockOffset((low + high) / 2, (high - low) / 2)


def clock_file(folder: Path, host: str) -> Path:
    """Return the file in which a host says what time it is."""
    return folder / f"clock-{re.sub(r'[^A-Za-z0-9._-]', '_', host)[:100]}.json"


def write_clock(folder: Path, host: str, content: Mapping[str, Any]) -> None:
    """Replace a host's file. Raises OSError."""
    write_run_json(folder, {"host": host, **content}, clock_file(folder, host).name, durable=False)


def read_clocks(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each host says, by its name; files that cannot be read are left out."""
    found = {}
    for path in folder.glob("clock-*.json"):
        try:
            content = read_json(path, _BYTES_LIMIT)
            if math.isfinite(content["sent"]):
                found[str(content["host"])] = content
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def offset_of(run_json: Mapping[str, Any]) -> ClockOffset | None:
    """Return the offset that a rank's file gives; None where it gives none."""
    found = []
    for name in ("clock_offset_s", "clock_uncertainty_s"):
        value = run_json.get(name)
        if not isinstance(value, int | float) or not abs(value) < _MOST_S:  # NaN is not
            return None
        found.append(float(value))
    return ClockOffset(*found)


def wall_offset_of(run_json: Mapping[str, Any]) -> float:
    """Return by how many seconds the wall clock of a rank's host was set since the rank began."""
    offset = run_json.get("wall_offset_s")
    if isinstance(offset, int | float) and abs(offset) < _MOST_S:  # NaN is not
        return float(offset)
    return 0.0


def now_of(run_json: Mapping[str, Any]) -> float:
    """Return the present by a rank's own clock, whose times are those of its rows."""
    return time.time() - wall_offset_of(run_json)


def ahead_of(run_json: Mapping[str, Any]) -> float:
    """Return by how many seconds a rank's clock is ahead of number 0's; 0 where nobody knows."""
    clock = offset_of(run_json)
    return clock.offset_s if clock else 0.0
