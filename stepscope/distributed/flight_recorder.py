"""Read the last collectives of this process from torch's Flight Recorder, without blocking.

NCCL and the other backends have a recorder each. The dumps are private functions of torch. They are
never asked for stacks: these take a second and may deadlock on the GIL. A dump of 2,000 entries
takes 10 to 15 ms and holds the GIL, a JSON one 25 to 30; parsing all of it takes 15 ms more.

NCCL's dump queries CUDA events and holds the GIL while the driver answers. So only the training
thread calls it, and not while it captures a graph, which the query would end. `debug_pipe` reads
NCCL's record in any other thread.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.common.clock import clock

DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Of gloo and others, and of NCCL; a CPU build of torch has only the first."""

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
    collective (None for messages, which only two ranks know). `created_s` is when this rank
    enqueued it, by the clock of its process, 0 where it is not known. `state` is torch's word:
    scheduled, started or completed; with gloo it stays scheduled, and `done` is right.
    `duration_s` is known only where collectives are timed. `record` counts the entries of one
    recorder, NCCL's or that of the other backends; `backend` is torch's name, such as gloo.
    """

    group: str
    operation: str
    sequence: int | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    input_bytes: int = 0
    output_bytes: int = 0
    created_s: float = 0.0
    state: str = ""
    done: bool = False
    duration_s: float | None = None
    record: int = 0
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderDump:
    """A dump: the newest collectives, oldest first, and the ranks of each group by its name."""

    collectives: tuple[Collective, ...]
    groups: Mapping[str, tuple[int, ...]]


def dump() -> FlightRecorderDump | None:
    """Return what torch has recorded; None without torch.distributed or without a recorder.

    Only the training thread may call this where a group uses NCCL.
    """
    parts = list(map(parsed, dumps().values()))
    if not parts:
        return None
    together = (one for part in parts for one in part.collectives)
    return FlightRecorderDump(
        collectives=tuple(sorted(together, key=lambda one: one.created_s)),
        groups={name: ranks for part in parts for name, ranks in part.groups.items()},
    )


def dumps() -> dict[str, Mapping[str, Any]]:
    """Return the dump of each recorder that this torch has, by the names of DUMPS."""
    library = _library()
    found: dict[str, Mapping[str, Any]] = {}
    for name in DUMPS:
        call, as_json = getattr(library, name, None), getattr(library, f"{name}_json", None)
        if call is not None:
            found[name] = unpickled(call(True, False, False))
        elif as_json is not None:
            found[name] = json.loads(as_json(True, False))
    return found


def counts() -> Any:
    """Return the last enqueued and completed collectives of NCCL's groups; None without NCCL.

    Any thread may call this: without the collectives themselves a dump asks no event and takes no
    lock (0.2 ms).
    """
    call = getattr(_library(), DUMPS[1], None)
    return None if call is None else unpickled(call(False, False, False)).get("pg_status")


def _library() -> Any:
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)


def unpickled(data: bytes) -> Mapping[str, Any]:
    """Return the content of a dump. Raises pickle.UnpicklingError, EOFError or ValueError."""
    content = _Plain(io.BytesIO(data)).load()
    if not isinstance(content, dict):
        raise pickle.UnpicklingError("a Flight Recorder dump must be a dict")
    return content


class _Plain(pickle.Unpickler):
    """torch writes dicts, lists and numbers; nothing else is loaded."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a Flight Recorder dump")


def parsed(content: Mapping[str, Any], after: int = -1) -> FlightRecorderDump:
    """Return a dump from its content, without records up to `after` and without malformed ones.

    >>> record = parsed({"entries": [], "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}})
    >>> record.groups
    {'0': (0, 1)}
    """
    found, wall_offset_s = [], clock.wall_offset()
    for entry in content.get("entries") or ():
        try:
            if after < 0 or entry.get("record_id", 0) > after:
                found.append(_collective(entry, wall_offset_s))
        except (KeyError, TypeError, ValueError):
            continue
    groups = {}
    for name, group in (content.get("pg_config") or {}).items():
        try:
            # gloo's default group has no name here, and "0" in its entries.
            groups[name or "0"] = tuple(map(int, json.loads(group["ranks"])))
        except (KeyError, TypeError, ValueError):
            continue
    return FlightRecorderDump(collectives=tuple(found), groups=groups)


def _collective(entry: Mapping[str, Any], wall_offset_s: float) -> Collective:
    group = entry["process_group"]
    duration = entry.get("duration_ms")
    backend, _, operation = str(entry["profiling_name"]).partition(":")
    return Collective(
        record=int(entry["record_id"]),
        sequence=None if entry.get("is_p2p") else int(entry["collective_seq_id"]),
        group=str(group[0]),
        operation=operation or backend,
        sizes=tuple(tuple(map(int, size)) for size in entry.get("input_sizes") or ()),
        input_bytes=_bytes(entry, "input"),
        output_bytes=_bytes(entry, "output"),
        created_s=int(entry["time_created_ns"]) / 1e9 - wall_offset_s,
        state=str(entry.get("state")),
        done=bool(entry.get("retired")) or entry.get("state") == "completed",
        duration_s=None if duration is None else float(duration) / 1e3,
        backend=backend if operation else "",
    )


def _bytes(entry: Mapping[str, Any], side: str) -> int:
    sizes, types = entry.get(f"{side}_sizes") or (), entry.get(f"{side}_dtypes") or ()
    return sum(
        math.prod(map(int, size)) * SIZES.get(kind, 1)
        for size, kind in zip(sizes, types, strict=False)
    )


def groups() -> dict[str, tuple[int, ...]]:
    """Return torch's numbers of the ranks of each group by its name; {} where nothing is told."""
    names, ranks = _listed("pg_names"), _listed("pg_group_ranks")
    found = {}
    for group, name in names.items():
        members = ranks.get(group)
        if isinstance(name, str) and isinstance(members, dict):
            found[name] = tuple(sorted(rank for rank in dict(members) if type(rank) is int))
    return found


def uses_nccl() -> bool:
    """Say whether any group has NCCL as its backend."""
    return any("nccl" in str(backend) for backend in _listed("pg_backend_config").values())


def _listed(name: str) -> dict[Any, Any]:
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return dict(getattr(getattr(module, "_world", None), name, None) or {})
    except (RuntimeError, TypeError):  # changed while it was copied; of another form
        return {}
