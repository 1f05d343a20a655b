"""Token of the state that a page is built from.

The page and every answer to a poll carry the token; the page reruns only if the two differ.
"""

from __future__ import annotations

import zlib

from dashboard.controls.actions import can_end_now
from dashboard.ranks.members import used_gpus
from dashboard.run_files import profiles, snapshots
from dashboard.run_list import Listing
from stepscope.remote.access import read_only_reason
from stepscope.run import RunInfo
from stepscope.store import STORE_NAME

_FACTS = (
    *("kind", "device", "devices", "optimizers", "custom", "commands", "capabilities"),
    *("total_steps", "world_size"),
)


def page_token(listing: Listing, run: RunInfo | None, busy: str | None = None) -> str:
    """Return the token of a page that shows `run`; `busy` is why no run can start, or None."""
    built_from: list[object] = [listing.version, busy]
    if run is not None:
        built_from += [
            *(run.id, run.status.value, can_end_now(run)),
            [run.run_json.get(name) for name in _FACTS],
            snapshots(run.folder),
            profiles(run.folder),
            sorted(used_gpus(run)),
        ]
        if "mirror" in run.run_json:  # its connection may be lost, its store received later
            refused = read_only_reason(run) if run.status.live else None
            built_from += [refused, (run.folder / STORE_NAME).exists()]
    return f"{zlib.crc32(repr(built_from).encode()):x}"
