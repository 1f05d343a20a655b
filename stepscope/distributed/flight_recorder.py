"""Read the latest collectives of this process from torch's Flight Recorder without blocking.

NCCL and the other backends have a recorder each, read by private functions of torch. Stacks are
never requested: they take a second and may deadlock on the GIL. A dump of 2,000 entries takes 10 to
15 ms and holds the GIL; parsing all of it takes 15 ms more.

A dump of NCCL's from Python queries CUDA events and holds the GIL, so a driver that does not answer
would block the whole process. torch's heartbeat monitor, a thread without the GIL, makes the same
dump when a byte arrives in its debug pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). torch logs each dump,
so a dump is requested only when the numbers of the collectives have changed.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import pickle
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from stepscope.common.files import PlainUnpickler, modified_ns, read_regular_file

RECORDER = "_dump_fr_trace"  # Of all backends but NCCL.
NCCL_RECORDER = "_dump_nccl_trace"  # Not in CPU builds.
SIZES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    "ComplexDouble": 16,
}
"""Bytes of an element by the dump's name of its type; 1 for all other types."""
_capturing: set[int] = set()
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


PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
MAX_BYTES = 64 * 2**20  # 2,000 collectives with stacks, which torch always adds, take some 10 MiB.
WAIT_S = 3.0  # Timeout of one `read`: the monitor reads its pipe once a second.
POLL_S = 0.1
OURS = "nccl-record-"  # Begins the name of a dump in the run folder; torch appends the rank.


def open_pipe(folder: Path) -> Callable[[], None] | None:
    """Make torch open its debug pipe when the ranks connect, and dump into `folder`.

    Variables of the user stay. Returns a function that reverts it, or None if nothing was set.
    """
    if PIPE in os.environ:
        return None
    # On a local disk: torch aborts a process that cannot make its FIFO.
    stem = Path(tempfile.gettempdir(), f"stepscope-nccl-{secrets.token_hex(8)}-")
    try:
        os.mkfifo(f"{stem}probe", 0o600)
        os.unlink(f"{stem}probe")
    except OSError:
        return None
    variables = {PIPE: str(stem)}
    if not any(name in os.environ for name in FILES):
        variables[FILES[0]] = str(folder / OURS)
    os.environ.update(variables)

    def close() -> None:
        for name, value in variables.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        for pipe in stem.parent.glob(f"{stem.name}*"):
            pipe.unlink(missing_ok=True)

    return close


def note_captures() -> None:
    """Track the capture of CUDA graphs by Python code, which a dump would end. Idempotent."""
    graph = getattr(getattr(sys.modules.get("torch"), "cuda", None), "CUDAGraph", None)
    if graph is None or "capture_begin" not in vars(graph) or hasattr(graph, "_stepscope_notes"):
        return
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def tracked_begin(self: Any, *args: Any, **options: Any) -> None:
        _capturing.add(id(self))
        try:
            begin(self, *args, **options)
        except BaseException:
            _capturing.discard(id(self))
            raise

    @functools.wraps(end)
    def tracked_end(self: Any) -> None:
        try:
            end(self)
        finally:
            _capturing.discard(id(self))

    graph.capture_begin, graph.capture_end = tracked_begin, tracked_end
    graph._stepscope_notes = True


class NcclRecord:
    """NCCL's Flight Recorder of this process. Not thread-safe."""

    def __init__(self) -> None:
        self._dump: FlightRecorderDump | None = None
        self._counts: Any = None  # The numbers of the collectives when `_dump` was requested.
        self._requested: Any = None  # The numbers at the latest request.
        self._before_ns = 0  # Modification time of the file before it.

    def read(self, rank: int) -> FlightRecorderDump | str:
        """Return the present dump, or the reason why it is missing; waits up to WAIT_S."""
        numbers = counts()
        if numbers is None:
            return "this torch has no Flight Recorder for NCCL"
        if self._dump is not None and numbers == self._counts:
            return self._dump
        file = Path(f"{_prefix()}{rank}")
        if numbers != self._requested:
            if (reason := self._request(file, rank)) is not None:
                return reason
            self._requested = numbers
        until = time.monotonic() + WAIT_S
        while (dump := self._read(file)) is None:
            if time.monotonic() > until:
                return "torch has not written NCCL's Flight Recorder yet"
            time.sleep(POLL_S)
        self._dump = dump
        self._counts = numbers
        return dump

    def _request(self, file: Path, rank: int) -> str | None:
        """Request a dump; return the reason if that is impossible."""
        if _capturing:
            return "a CUDA graph is being captured"
        if (stem := os.environ.get(PIPE)) is None:
            return f"NCCL's Flight Recorder is not read: {PIPE} was not set when the ranks met"
        self._before_ns = modified_ns(file)
        try:
            pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(pipe, "wb", buffering=0) as writer:
                writer.write(b"1")
        except OSError as error:
            return f"NCCL's Flight Recorder is not read: no debug pipe ({error.strerror})"
        return None

    def _read(self, file: Path) -> FlightRecorderDump | None:
        """Return the dump; None until torch has written it."""
        if modified_ns(file) in (0, self._before_ns):
            return None
        try:
            dump = parsed(unpickled(read_regular_file(file, MAX_BYTES)))
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):  # incomplete
            return None
        if file.name.startswith(OURS):  # a dump that torch makes at a timeout stays
            file.unlink()
        return dump


def _prefix() -> str:
    """Return the path of torch's dumps without the rank."""
    for name in FILES:
        if os.environ.get(name):
            return os.environ[name]
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/tmp')}/.cache"
    return f"{cache}/torch/comm_lib_trace_rank_"
