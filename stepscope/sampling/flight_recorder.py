"""torch's Flight Recorder: the last collectives of this process, read without waiting for any.

The dump is a private function of torch (`_dump_fr_trace_json`), found in `sys.modules`. It is never
asked for stacks: they take a second and may deadlock on the GIL. A dump takes 0.3 to 40 ms.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    "ComplexDouble": 16,
}
"""Bytes of an element by the name that the dump gives its type; of any other type 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, or one message between two ranks, as this rank has enqueued it.

    `sequence` counts the collectives of a group: the same number on all its ranks is the same
    collective (`None` for messages, which only two ranks know). `created_s` is when this rank
    enqueued it, in epoch seconds of its host. `state` is torch's word: scheduled, started or
    completed; with gloo it stays scheduled, and `done` tells. `duration_s` is known only where
    collectives are timed.
    """

    record: int
    sequence: int | None
    group: str
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    input_bytes: int
    output_bytes: int
    created_s: float
    state: str
    done: bool
    duration_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """A dump: the newest collectives, oldest first, and the ranks of each group by its name."""

    collectives: tuple[Collective, ...]
    groups: Mapping[str, tuple[int, ...]]


def dump() -> FlightRecord | None:
    """Return what torch has recorded; None without torch.distributed or without a recorder.

    Any thread may call this, also while another one waits in a collective.
    """
    torch = sys.modules.get("torch")
    library = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    call = getattr(library, "_dump_fr_trace_json", None)
    if call is None:
        return None
    return parsed(json.loads(call(True, False)))


def parsed(content: Mapping[str, Any]) -> FlightRecord:
    """Return a dump from its JSON; entries of another form are left out.

    >>> record = parsed({"entries": [], "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}})
    >>> record.groups
    {'0': (0, 1)}
    """
    found = []
    for entry in content.get("entries") or ():
        try:
            found.append(_collective(entry))
        except (KeyError, TypeError, ValueError):
            continue
    groups = {}
    for name, group in (content.get("pg_config") or {}).items():
        try:
            # gloo's default group has no name here, and "0" in its entries.
            groups[name or "0"] = tuple(map(int, json.loads(group["ranks"])))
        except (KeyError, TypeError, ValueError):
            continue
    return FlightRecord(collectives=tuple(found), groups=groups)


def _collective(entry: Mapping[str, Any]) -> Collective:
    group = entry["process_group"]
    duration = entry.get("duration_ms")
    return Collective(
        record=int(entry["record_id"]),
        sequence=None if entry.get("is_p2p") else int(entry["collective_seq_id"]),
        group=str(group[0]),
        operation=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        sizes=tuple(tuple(map(int, size)) for size in entry.get("input_sizes") or ()),
        input_bytes=_bytes(entry, "input"),
        output_bytes=_bytes(entry, "output"),
        created_s=int(entry["time_created_ns"]) / 1e9,
        state=str(entry.get("state")),
        done=bool(entry.get("retired")) or entry.get("state") == "completed",
        duration_s=None if duration is None else float(duration) / 1e3,
    )


def _bytes(entry: Mapping[str, Any], side: str) -> int:
    sizes, types = entry.get(f"{side}_sizes") or (), entry.get(f"{side}_dtypes") or ()
    return sum(
        math.prod(map(int, size)) * SIZES.get(kind, 1)
        for size, kind in zip(sizes, types, strict=False)
    )
