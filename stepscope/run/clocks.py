"""The present by the clock of a run, which does not change when its host's clock is set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def wall_offset_of(run_json: Mapping[str, Any]) -> float:
    """Return the seconds by which the clock of a rank's host was set since the rank began."""
    return run_json.get("wall_offset_s") or 0.0


def now_of(run_json: Mapping[str, Any]) -> float:
    """Return the present by a rank's own clock, whose times are those of its rows."""
    return time.time() - wall_offset_of(run_json)
