"""Read NCCL's Flight Recorder while a driver may not answer: torch writes it to a file on request.

A dump from Python queries CUDA events and holds the GIL, so a driver that does not answer would
block the whole process. torch's heartbeat monitor, a thread without the GIL, makes the same dump
when a byte arrives in its debug pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). torch logs each dump, so
one is requested only when the numbers of the collectives have changed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.common.files import read_regular_file
from stepscope.distributed.flight_recorder import FlightRecorderDump, counts, parsed, unpickled

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
MAX_BYTES = 64 * 2**20
"""2,000 collectives with their stacks, which torch writes here in any case, take some 10 MiB."""
WAIT_S = 3.0  # Longest wait of one look: the monitor reads its pipe once a second.
LATE_S = 60.0  # Age from which a request counts as not answered.
POLL_S = 0.1

OURS = "nccl-record-"
"""Begins the name of a dump in the run folder, behind which torch puts the rank's number."""

_capturing: set[int] = set()


def open_pipe(folder: Path) -> Callable[[], None] | None:
    """Have torch open its debug pipe when the script connects its ranks, and dump into `folder`.

    What the user has set stays. Return what takes it back, None if nothing was set.
    """
    if PIPE in os.environ:
        return None
    # On this machine, and never deleted: torch aborts a process, also one that has inherited the
    # variables, where it cannot make its FIFO.
    private = Path(tempfile.gettempdir(), f"stepscope-nccl-{os.getuid()}")
    stem = private / f"{secrets.token_hex(8)}-"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        made = private.lstat()
        if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.getuid() or made.st_mode & 0o077:
            return None
        os.mkfifo(f"{stem}probe")
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
        for pipe in private.glob(f"{stem.name}*"):
            pipe.unlink(missing_ok=True)

    return close


def note_captures() -> None:
    """Let the thread that captures a CUDA graph note it: a dump would end the capture.

    Called again, it does nothing. Graphs that C++ code captures by itself are not seen.
    """
    graph = getattr(getattr(sys.modules.get("torch"), "cuda", None), "CUDAGraph", None)
    if graph is None or "capture_begin" not in vars(graph) or hasattr(graph, "_stepscope_notes"):
        return
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def noted_begin(self: Any, *args: Any, **options: Any) -> None:
        _capturing.add(id(self))
        try:
            begin(self, *args, **options)
        except BaseException:
            _capturing.discard(id(self))
            raise

    @functools.wraps(end)
    def noted_end(self: Any) -> None:
        try:
            end(self)
        finally:
            _capturing.discard(id(self))

    graph.capture_begin, graph.capture_end, graph._stepscope_notes = noted_begin, noted_end, True


class NcclRecord:
    """What NCCL's recorder of this process holds; used by one thread."""

    def __init__(self) -> None:
        self._record: FlightRecorderDump | None = None
        self._counts: Any = None
        """The numbers of the collectives when `_record` was requested."""
        self._requested: tuple[float, int | None, Any] | None = None
        """When a dump was requested, the time of the file before it, and the numbers then."""

    def look(self, rank: int) -> FlightRecorderDump | str:
        """Return the record as of now, or why there is none; waits WAIT_S at most."""
        until = time.monotonic() + WAIT_S
        while (told := self._look(rank)) is None:
            if time.monotonic() > until:
                return "torch has not written NCCL's Flight Recorder yet"
            time.sleep(POLL_S)
        return told

    def _look(self, rank: int) -> FlightRecorderDump | str | None:
        """Return the record or why there is none; None while torch writes it."""
        now = counts()
        if now is None:
            return "this torch has no Flight Recorder for NCCL"
        file = Path(f"{_prefix()}{rank}")
        if self._requested is None and (self._record is None or now != self._counts):
            if _capturing:
                return "a CUDA graph is being captured"
            refused = self._request(rank, file, now)
            if refused is not None:
                return refused
        if self._requested is not None:
            self._take(file)
        return self._record if self._requested is None and now == self._counts else None

    def _request(self, rank: int, file: Path, now: Any) -> str | None:
        stem = os.environ.get(PIPE)
        if stem is None:
            return f"NCCL's Flight Recorder is not read: {PIPE} was not set when the ranks met"
        before = _written(file)
        try:
            pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            return f"NCCL's Flight Recorder is not read: no debug pipe ({error.strerror})"
        try:
            os.write(pipe, b"1")
        finally:
            os.close(pipe)
        self._requested = time.monotonic(), before, now
        return None

    def _take(self, file: Path) -> None:
        """Read the dump that was requested, if it is complete."""
        assert self._requested is not None
        begun, before, numbers = self._requested
        if _written(file) not in (None, before):
            # Incomplete while torch writes it: read again by the next look.
            with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
                content = unpickled(read_regular_file(file, MAX_BYTES))
                self._record, self._counts = parsed(content), numbers
                self._requested = None
                if file.name.startswith(OURS):  # one that torch writes at a time-out stays
                    file.unlink()
        if self._requested is not None and time.monotonic() - begun > LATE_S:
            self._requested = None


def _prefix() -> str:
    """Return where torch writes its dumps, without the rank's number."""
    for name in FILES:
        if os.environ.get(name):
            return os.environ[name]
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '/tmp')}/.cache"
    return f"{cache}/torch/comm_lib_trace_rank_"


def _written(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
