"""Token of the state that a page is built from.

The page and every answer to a poll carry the token; the page reruns only if the two differ.
"""

from __future__ import annotations

import zlib

from dashboard.controls.actions import can_end_now
from dashboard.ranks.members import used_gpus
from dashboard.run_files import profiles, snapshots
from dashboard.run_index import RunList
from stepscope.run import RunInfo, read_only_reason
from stepscope.store import STORE_NAME

_FACTS = (
    *("kind", "device", "devices", "optimizers", "custom", "commands", "capabilities"),
    *("total_steps", "world_size"),
)


def page_token(listing: RunList, run: RunInfo | None, measuring: str | None = None) -> str:
    """Return the token of a page that shows `run`.

    `measuring`: the running sweep or lesson, during which no training can start.
    """
    state = listing.version
    if measuring is not None:
        state += f"{zlib.crc32(measuring.encode()):x}"
    if run is None:
        return state
    run_json = [run.run_json.get(name) for name in _FACTS]
    files = snapshots(run.folder), profiles(run.folder)
    stuck = can_end_now(run)
    used = sorted(used_gpus(run))
    built_from: tuple[object, ...] = (run.id, run.status.value, run_json, files, stuck, used)
    if "mirror" in run.run_json:  # its connection may be lost, its store received later
        refused = read_only_reason(run) if run.status.live else None
        built_from += refused, (run.folder / STORE_NAME).exists()
    return f"{state}-{zlib.crc32(repr(built_from).encode()):x}"
