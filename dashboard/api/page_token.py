"""When an open page must run again; pure but for a look into the run's folder.

A page is built from a few facts that seldom change. Their short name goes to the browser with the
page and with every answer to a poll: where the two differ, the page runs again, and only then.
"""

from __future__ import annotations

import zlib

from dashboard.controls.actions import can_end_now
from dashboard.run_files import profiles, snapshots
from dashboard.run_index import RunList
from stepscope.run import RunInfo

_FACTS = (
    *("kind", "device", "devices", "optimizers", "custom", "commands", "capabilities"),
    *("total_steps", "world_size", "restart_of", "restarted_as", "job_end"),
)


def page_token(listing: RunList, run: RunInfo | None, measuring: str | None = None) -> str:
    """Return the name of what a page that shows `run` is built from.

    `measuring` is the sweep or lesson that runs, beside which no training can be started.
    """
    state = listing.version
    if measuring is not None:
        state += f"{zlib.crc32(measuring.encode()):x}"
    if run is None:
        return state
    run_json = [run.run_json.get(name) for name in _FACTS]
    # A drawing of 200 points need not be compared point by point.
    files = snapshots(run.folder), profiles(run.folder)
    stuck = can_end_now(run)
    built_from = (run.id, run.status.value, run_json, "fit" in run.run_json, files, stuck)
    return f"{state}-{zlib.crc32(repr(built_from).encode()):x}"
