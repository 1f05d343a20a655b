"""`stepscope runs`: the table of recorded runs, live ones first, then newest first."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from stepscope.formatting import duration_text, printable
from stepscope.run import (
    RunError,
    RunInfo,
    RunKind,
    read_only_reason,
    read_run,
    run_folders,
)


def print_runs(root: Path, *, as_json: bool = False) -> int:
    """Print the runs under `root`; a folder that cannot be read costs a line on stderr. Return 0.

    0.1 ms a run.
    """
    runs = []
    for folder in run_folders(root):
        try:
            runs.append(read_run(folder))
        except RunError as error:
            print(printable(str(error)), file=sys.stderr)
    runs.sort(key=lambda run: not run.status.live)
    if as_json:
        print(json.dumps([as_json_values(run) for run in runs], indent=1))
    elif not runs:
        print(f"No runs in {root.resolve()}. Start one on the page, or set STEPSCOPE_RUNS.")
    width = max((len(run.id) for run in runs), default=0)
    for run in runs if not as_json else ():
        print(line(run, width))
    return 0


def line(run: RunInfo, width: int) -> str:
    """Return a run's line: id, kind, status, step, start, duration, and whose it is if not ours."""
    values = as_json_values(run)
    cells = [
        f"{run.id:<{width}}",
        f"{values['kind']:<7}",
        f"{run.status:<8}",
        f"step {values['step']!s:>8}",
        _when(values["created"]),
        f"{duration_text(values['duration_s']):>12}",
    ]
    if values["read_only"]:
        cells.append(f"{values['user']}@{values['host']}")
    return printable("  ".join(cells).rstrip())


def as_json_values(run: RunInfo) -> dict[str, Any]:
    """Return a run as JSON values; times in epoch seconds, `ended` null while it is live.

    A crashed run ended, as far as anyone knows, with its last heartbeat.
    """
    values = run.run_json
    live = run.status.live
    created = _number(run.created)
    until = _number(time.time() if live else values.get("ended", values["heartbeat"]))
    duration = None if created is None or until is None else max(0.0, until - created)
    return {
        "id": run.id,
        "name": values.get("name"),
        "kind": str(values.get("kind", RunKind.TRAINER)),
        "status": run.status,
        "reason": run.reason,
        "step": _number(values.get("step", 0)),
        "epoch": _number(values.get("epoch", 0)),
        "created": created,
        "ended": None if live else until,
        "duration_s": duration,
        "user": values.get("user"),
        "host": values.get("host"),
        "read_only": read_only_reason(run) is not None,
    }


def _when(created: float | None) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(created or 0))
    except (OverflowError, ValueError, OSError):  # no year that this system can print
        return "?".ljust(16)


def _number(value: Any) -> float | None:
    """The value where it is a finite number: others write run.json, and JSON knows no infinity."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
