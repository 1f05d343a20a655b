"""What every benchmark's report has: the machine, its load, the targets; and progress on stderr."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import psutil

from stepscope.host.environment import cpu_name

QUIET_LOAD = 0.7
"""One-minute load average above which the numbers are marked as taken on a busy machine."""


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed; None without values."""
    return float(np.quantile(values, share, method="higher")) if values else None


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def wait_for_quiet(limit_s: float) -> None:
    """Wait, at most `limit_s`, until the machine has nothing else to do."""
    deadline = time.monotonic() + limit_s
    while os.getloadavg()[0] >= QUIET_LOAD and time.monotonic() < deadline:
        say(f"waiting for a quiet machine: load {os.getloadavg()[0]:.2f}")
        time.sleep(10)


def report(
    benchmark: str, options: dict[str, Any], load_before: float, results: dict[str, Any]
) -> None:
    """Print the result as one JSON line; it is met when every target with a value is."""
    targets = results["targets"]
    facts = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": options,
        "machine": _machine(),
        "load_before": round(load_before, 2),
        "quiet": load_before < QUIET_LOAD,
        **results,
        "met": all(target["met"] for target in targets.values()),
    }
    print(json.dumps(rounded(facts), ensure_ascii=False))


def at_most(value: float | None, limit: float) -> dict[str, Any]:
    """Return a target of the report; a value that could not be measured does not meet it."""
    return {"value": value, "at_most": limit, "met": value is not None and value <= limit}


def at_least(value: float | None, limit: float) -> dict[str, Any]:
    """Return a target of the report; a value that could not be measured does not meet it."""
    return {"value": value, "at_least": limit, "met": value is not None and value >= limit}


def rounded(value: Any) -> Any:
    """Return JSON values with all floats at four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def _machine() -> dict[str, Any]:
    packages = ("torch", "streamlit", "plotly")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # as on a machine with a GPU that has no page
        return None
