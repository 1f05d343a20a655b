"""`stepscope runs`: the table of recorded runs, live ones first, then newest first."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import add_json
from stepscope.common.formatting import format_duration, printable
from stepscope.remote.access import read_only_reason
from stepscope.run import (
    RunError,
    RunInfo,
    RunKind,
    check_readable,
    read_metadata,
    read_run,
    run_folders,
)
from stepscope.run.info import shown_status

EXAMPLES = ("stepscope runs", "stepscope runs --json | jq '.[0].id'")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_json(parser, "print a JSON array with more fields")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the runs under `root` (0.1 ms a run), and unreadable ones on stderr; return 1 for none.

    Raises RunError if `root` cannot be read.
    """
    check_readable(root)
    runs, unread = [], 0
    for folder in run_folders(root):
        try:
            runs.append(read_run(folder))
        except RunError as error:
            unread += 1
            print(printable(str(error)), file=sys.stderr)
    runs.sort(key=lambda run: (not run.status.live, -run.created))
    if options.json:
        print(json.dumps([json_values(run) for run in runs], indent=1))
    elif not runs and not unread:
        print(f"No runs in {root.resolve()}. Start one on the page, or set STEPSCOPE_RUNS.")
    else:
        width = max((len(run.id) for run in runs), default=0)
        for run in runs:
            print(line(run, width))
    return int(unread > 0 and not runs)


def line(run: RunInfo, width: int) -> str:
    """Return a run's line: id, kind, status, step, start, duration, group, tags, other owner."""
    values = json_values(run)
    cells = [
        f"{run.id:<{width}}",
        f"{values['kind']:<7}",
        f"{values['status']:<8}",
        f"step {values['step']!s:>8}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created)),
        f"{format_duration(values['duration_s']):>12}",
    ]
    cells += [values["group"]] if values["group"] else []
    cells += [f"#{tag}" for tag in values["tags"]]
    if values["read_only"]:
        cells.append(f"{values['user']}@{values['host']}")
    return printable("  ".join(cells).rstrip())


def json_values(run: RunInfo) -> dict[str, Any]:
    """Return a run as JSON values, with times in epoch seconds.

    `ended` is null while the run is live. The end of a crashed run is its last heartbeat.
    """
    values, metadata = run.run_json, read_metadata(run)
    live = run.status.live
    until = time.time() if live else values.get("ended", values["heartbeat"])
    duration = None if until is None else max(0.0, until - run.created)
    return {
        "id": run.id,
        "name": metadata.name,
        "group": metadata.group,
        "tags": list(metadata.tags),
        "kind": str(values.get("kind", RunKind.TRAINER)),
        "status": shown_status(run.status, metadata),
        "reason": run.reason,
        "step": values.get("step", 0),
        "epoch": values.get("epoch", 0),
        "created": run.created,
        "ended": None if live else until,
        "duration_s": duration,
        "user": values.get("user"),
        "host": values.get("host"),
        "read_only": read_only_reason(run) is not None,
    }
