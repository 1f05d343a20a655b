"""Parse the Chrome trace that torch's profiler writes. Pure; no I/O.

Form: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event
Format): complete events (`ph` X) with `ts` and `dur` in microseconds, nested by time in each `tid`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, BinaryIO

import msgspec

OPERATOR, FRAME, ANNOTATION = "cpu_op", "python_function", "user_annotation"
GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
MEMORY = "[memory]"
CPU, CUDA = 0, 1  # Device types of torch (c10/core/DeviceType.h).
NONE = -1  # The number of an unknown link or call.

_OWN = re.compile(r"stepscope/session/command(s|_server)\.py\(\d+\): serve$").search
_CHUNK_BYTES = 2**20
_SPACES = b" " * 32 + bytes(range(32, 256))
_INVALID = re.compile(
    rb"(\\\\|\\uD[89AB]\w\w\\uD[C-F]\w\w)"  # valid: a backslash, and a surrogate pair
    rb"|\\uD[89A-F]\w\w"
    rb"|(?<![^:,\[\s])-?(?:nan|inf(?:inity)?)(?=\s*(?:[,}\]]|\Z))",  # also at the chunk's ends
    re.IGNORECASE,
)
"""Half surrogate pairs and numbers that are invalid in JSON, which torch writes nevertheless."""


class EventArgs(msgspec.Struct, gc=False):
    """Arguments of an event: `link` is an operator's id, `call` the id of a CUDA call."""

    link: int = msgspec.field(default=NONE, name="External id")
    call: int = msgspec.field(default=NONE, name="correlation")
    size: int = msgspec.field(default=0, name="Bytes")  # Allocated, or freed (negative), bytes.
    device_type: int = msgspec.field(default=NONE, name="Device Type")


class TraceSpan(msgspec.Struct, gc=False):
    """An event of one thread. The `link` of GPU work is the operator that started the work."""

    start_us: float = msgspec.field(name="ts")
    duration_us: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(default=0.0, name="dur")
    name: str = ""
    tid: int | str = ""
    ph: str = ""
    cat: str = ""
    args: EventArgs = msgspec.field(default_factory=EventArgs)

    @property
    def end_us(self) -> float:
        """The time at which it ended."""
        return self.start_us + self.duration_us


class _File(msgspec.Struct):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")


_Threads = defaultdict[int, list[TraceSpan]]


class ChromeTrace:
    """Events of a trace by thread and in order of time: an enclosing span before its parts.

    `file` is read once, into one copy. Raises ValueError if it is malformed. Malformed events are
    skipped.
    """

    def __init__(self, file: BinaryIO) -> None:
        try:
            events = msgspec.json.decode(_content(file), type=_File).events
        except msgspec.DecodeError:
            file.seek(0)
            events = msgspec.json.decode(_content(file, _valid), type=_File).events
        self.operators, self.frames, self.annotations = (_Threads(list) for _ in range(3))
        self.allocations = _Threads(list)
        self.gpu: list[TraceSpan] = []
        self.launches: dict[int, float] = {}  # Start of each CUDA call in microseconds, by its id.
        kinds = {OPERATOR: self.operators, FRAME: self.frames, ANNOTATION: self.annotations}
        decode = msgspec.json.Decoder(TraceSpan).decode
        for raw in events:
            with suppress(msgspec.ValidationError):
                event = decode(raw)
                if event.name == MEMORY and isinstance(event.tid, int):
                    self.allocations[event.tid].append(event)
                elif event.ph != "X":
                    continue
                elif event.cat in kinds and isinstance(event.tid, int):
                    kinds[event.cat][event.tid].append(event)
                elif event.cat in GPU_WORK:
                    self.gpu.append(event)
                elif event.cat in LAUNCHES and event.args.call != NONE:
                    self.launches[event.args.call] = event.start_us
        for threads in kinds.values():
            for spans in threads.values():
                spans.sort(key=lambda span: (span.start_us, -span.duration_us))

    def leave_out_own(self, thread: int) -> list[tuple[float, float]]:
        """Remove Stepscope's own work (by its frames, if any) from a thread; return its spans."""
        frames = self.frames.get(thread, ())
        own = [(span.start_us, span.end_us) for span in frames if _OWN(span.name)]
        starts = [start_us for start_us, _ in own]

        def is_own(span: TraceSpan) -> bool:
            index = bisect_right(starts, span.start_us) - 1
            return index >= 0 and span.start_us < own[index][1]

        for threads in (self.operators, self.frames, self.annotations):
            if thread in threads:
                threads[thread] = [span for span in threads[thread] if not is_own(span)]
        return own

    def main_thread(self, wanted: int | None = None) -> int | None:
        """Return `wanted` if that thread has operators, else the thread with the most."""
        if wanted in self.operators:
            return wanted
        return max(self.operators, key=lambda tid: len(self.operators[tid]), default=None)


def _content(file: BinaryIO, changed: Callable[[bytes], bytes] = bytes) -> bytearray:
    """Return the lines of a file as UTF-8, some megabytes of lines `changed` at a time."""
    content = bytearray()
    while lines := b"".join(file.readlines(_CHUNK_BYTES)):
        # torch does not escape control characters in names.
        content += changed(lines.translate(_SPACES).decode(errors="replace").encode())
    return content


def _valid(lines: bytes) -> bytes:
    return _INVALID.sub(_replacement, lines)


def _replacement(match: re.Match[bytes]) -> bytes:
    """Return valid JSON: null, which no required field accepts, or a replacement character."""
    return match[1] or (rb"\ufffd" if match[0].startswith(b"\\") else b"null")


def parents(spans: list[TraceSpan]) -> list[int]:
    """Return the index of each span's enclosing span, or -1; in `spans` it is before its parts."""
    outer, around = [], list[int]()
    for index, span in enumerate(spans):
        while around and spans[around[-1]].end_us <= span.start_us:
            around.pop()
        outer.append(around[-1] if around else -1)
        around.append(index)
    return outer


def self_times(spans: list[TraceSpan], parent: list[int]) -> list[float]:
    """Return the microseconds of each span without the spans within it."""
    times = [span.end_us - span.start_us for span in spans]
    for index, outer in enumerate(parent):
        if outer >= 0:
            inside = min(spans[index].end_us, spans[outer].end_us) - spans[index].start_us
            times[outer] -= inside
    return [max(0.0, time) for time in times]
