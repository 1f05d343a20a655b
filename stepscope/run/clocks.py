"""The present by the clock of a run, whose times do not follow a wall clock that is set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_MAX_OFFSET_S = 2.0**32
"""No clock is set by more: one without a battery begins in 1970."""


def wall_offset_of(run_json: Mapping[str, Any]) -> float:
    """Return by how many seconds the wall clock of a rank's host was set since the rank began."""
    offset = run_json.get("wall_offset_s")
    if isinstance(offset, int | float) and abs(offset) < _MAX_OFFSET_S:  # NaN is not
        return float(offset)
    return 0.0


def now_of(run_json: Mapping[str, Any]) -> float:
    """Return the present by a rank's own clock, whose times are those of its rows."""
    return time.time() - wall_offset_of(run_json)
