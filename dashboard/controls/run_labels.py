"""What a run is called in the list; pure.

No label ages: it holds a time of day, never "2 minutes ago", so that an open page need not run
again for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

from dashboard.charts.run_view import run_kind
from stepscope.common.formatting import format_duration, printable
from stepscope.run import RunInfo, RunKind, read_only_reason

KINDS = {
    RunKind.TRAINER: "built-in",
    RunKind.WATCH: "watched",
    RunKind.INIT: "script",
    RunKind.RECORD: "recording",
}
NAME_LENGTH = 60


def labels(runs: Iterable[RunInfo], now: float | None = None) -> dict[str, str]:
    """Return each run's label by its id, no two alike: the list knows them apart by it.

    "● train.py · watched · running · since 14:02", "digits_cnn · built-in · finished · 20 Nov
    14:02 · 3 min 05 s", and user@host for a run that is not ours.
    """
    now = time.time() if now is None else now
    made = {run.id: _label(run, now) for run in runs}
    seen = Counter(made.values())
    return {
        run_id: label if seen[label] == 1 else f"{label} · {run_id}"
        for run_id, label in made.items()
    }


def run_name(run: RunInfo) -> str:
    """Return what a person calls the run: its script with the ending, or the name it was given."""
    name = str(run.run_json.get("name") or run.id)
    script = run.run_json.get("script")
    path = PurePath(str(script.get("path", ""))) if isinstance(script, dict) else PurePath()
    if path.stem == name:
        name = path.name
    return printable(name)[:NAME_LENGTH]


def _label(run: RunInfo, now: float) -> str:
    live = run.status.live
    when = _clock(run.created, now)
    parts = [
        f"● {run_name(run)}" if live else run_name(run),
        KINDS[run_kind(run)],
        str(run.status),
        f"since {when}" if live else when,
    ]
    if not live and run.ended is not None:
        parts.append(format_duration(max(0.0, run.ended - run.created)))
    if read_only_reason(run) is not None:
        parts.append(
            printable(f"{run.run_json.get('user')}@{run.run_json.get('host')}")[:NAME_LENGTH]
        )
    return " · ".join(parts)


def _clock(moment: float, now: float) -> str:
    then, today = time.localtime(moment), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%d %b %H:%M" if then[0] == today[0] else "%d %b %Y", then)
