"""Read NCCL's Flight Recorder from a file that torch writes on request, without calling CUDA.

A dump from Python queries CUDA events and holds the GIL, so a driver that does not answer would
block the whole process. torch's heartbeat monitor, a thread without the GIL, makes the same dump
when a byte arrives in its debug pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). torch logs each dump, so a
dump is requested only when the numbers of the collectives have changed.
"""

from __future__ import annotations

import os
import pickle
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.common.files import modified_ns, read_regular_file
from stepscope.distributed.flight_recorder import FlightRecorderDump, counts, parsed, unpickled

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
