"""Read the latest collectives of this process from torch's Flight Recorder without blocking.

NCCL and the other backends have a recorder each, read by private functions of torch. Stacks are
never requested: they take a second and may deadlock on the GIL. A dump of 2,000 entries takes 10 to
15 ms and holds the GIL; parsing all of it takes 15 ms more.

NCCL's dump queries CUDA events and holds the GIL while the driver answers, so it is read by
`debug_pipe`.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from stepscope.common.plain_pickle import PlainUnpickler

RECORDER = "_dump_fr_trace"  # Of all backends but NCCL.
NCCL_RECORDER = "_dump_nccl_trace"  # Not in CPU builds.
SIZES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    "ComplexDouble": 16,
}
"""Bytes of an element by the dump's name of its type; 1 for all other types."""
Text = Annotated[str, Meta(max_length=2000)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
"""Fields of untrusted files, which msgspec checks; seconds since the epoch or of a duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective or point-to-point operation as enqueued by this rank.

    `sequence` counts the collectives of a group: equal numbers on its ranks are the same collective
    (None for point-to-point operations). `created_s` is when this rank enqueued it, by the clock of
    its process, or 0 if unknown.
    """

    group: Text
    operation: Text
    sequence: Count | None = None
    input_bytes: Count = 0
    created_s: Seconds = 0.0
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderDump:
    """The newest collectives, oldest first, and the global ranks of each group by its name."""

    collectives: tuple[Collective, ...]
    groups: Mapping[str, tuple[int, ...]]


def dump() -> FlightRecorderDump | None:
    """Return the recorder of all backends but NCCL; None if this torch has none."""
    call = getattr(_library(), RECORDER, None)
    return None if call is None else parsed(unpickled(call(True, False, False)))


def counts() -> Any:
    """Return the last enqueued and completed collective of each NCCL group; None without NCCL.

    Thread-safe: a dump without collectives queries no event and takes no lock (0.2 ms).
    """
    call = getattr(_library(), NCCL_RECORDER, None)
    return None if call is None else unpickled(call(False, False, False)).get("pg_status")


def _library() -> Any:
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)


def unpickled(data: bytes) -> Mapping[str, Any]:
    """Return the content of a dump. Raises pickle.UnpicklingError, EOFError or ValueError."""
    content = PlainUnpickler(io.BytesIO(data)).load()
    if not isinstance(content, dict):
        raise pickle.UnpicklingError("a Flight Recorder dump must be a dict")
    return content


def parsed(content: Mapping[str, Any]) -> FlightRecorderDump:
    """Return a dump from its content, without malformed records.

    >>> record = parsed({"entries": [], "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}})
    >>> record.groups
    {'0': (0, 1)}
    """
    collectives = []
    for entry in content.get("entries") or ():
        try:
            collectives.append(_collective(entry))
        except (KeyError, TypeError, ValueError):
            continue
    groups = {}
    for name, group in (content.get("pg_config") or {}).items():
        try:
            # gloo's default group has no name here, and "0" in its entries.
            groups[name or "0"] = tuple(map(int, json.loads(group["ranks"])))
        except (KeyError, TypeError, ValueError):
            continue
    return FlightRecorderDump(collectives=tuple(collectives), groups=groups)


def _collective(entry: Mapping[str, Any]) -> Collective:
    backend, _, operation = str(entry["profiling_name"]).partition(":")
    return Collective(
        sequence=None if entry.get("is_p2p") else int(entry["collective_seq_id"]),
        group=str(entry["process_group"][0]),
        operation=operation or backend,
        input_bytes=_input_bytes(entry),
        created_s=int(entry["time_created_ns"]) / 1e9,
        # With gloo the state stays "scheduled".
        done=bool(entry.get("retired")) or entry.get("state") == "completed",
    )


def _input_bytes(entry: Mapping[str, Any]) -> int:
    sizes, types = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    tensors = zip(sizes, types, strict=False)
    return sum(math.prod(map(int, size)) * SIZES.get(kind, 1) for size, kind in tensors)


def groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each group by its name; {} if unknown."""
    names, ranks = _world("pg_names"), _world("pg_group_ranks")
    return {
        name: tuple(sorted(rank for rank in dict(ranks[group]) if type(rank) is int))
        for group, name in names.items()
        if isinstance(name, str) and isinstance(ranks.get(group), dict)
    }


def uses_nccl() -> bool:
    """Return True if any group has NCCL as its backend."""
    return any("nccl" in str(backend) for backend in _world("pg_backend_config").values())


def _world(name: str) -> dict[Any, Any]:
    """Return a copy of one of torch's tables of groups; {} if torch has none."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return dict(getattr(getattr(module, "_world", None), name, None) or {})
    except (RuntimeError, TypeError):  # changed while it was copied, or malformed
        return {}
