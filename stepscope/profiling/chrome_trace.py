"""Reads what torch's profiler writes: a chrome trace. Pure.

Form: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event
Format): complete events (`ph` X) with `ts` and `dur` in microseconds, nested by time in each `tid`.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OPERATOR, FRAME, ANNOTATION = "cpu_op", "python_function", "user_annotation"
GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
MEMORY = "[memory]"
CPU, CUDA = 0, 1
"""Device types of torch (c10/core/DeviceType.h)."""

_OWN = re.compile(r"stepscope/session/command(s|_server)\.py\(\d+\): serve$").search
_BETWEEN = re.compile(r"[\s,]*")


class TraceSpan(NamedTuple):
    """Something that took time in one thread; `link` tells which GPU work an operator started."""

    start_us: float
    end_us: float
    name: str
    link: int | None = None


class GpuActivity(NamedTuple):
    """A kernel or a copy: `link` is that of the operator which started it, `call` that of CUDA."""

    duration_us: float
    link: int | None
    call: int | None = None


class MemoryEvent(NamedTuple):
    """Bytes taken (positive) or given back (negative) on a device type."""

    at_us: float
    size: int
    device_type: int


@dataclass(slots=True)
class ChromeTrace:
    """A trace, its events by thread and in order of time: an enclosing span before its parts."""

    operators: dict[int, list[TraceSpan]] = field(default_factory=dict)
    frames: dict[int, list[TraceSpan]] = field(default_factory=dict)
    annotations: dict[int, list[TraceSpan]] = field(default_factory=dict)
    allocations: dict[int, list[MemoryEvent]] = field(default_factory=dict)
    gpu: list[GpuActivity] = field(default_factory=list)
    launches: dict[int, float] = field(default_factory=dict)
    """When each call of CUDA was made, in microseconds, by its number."""
    events: int = 0


def read_trace(text: str) -> ChromeTrace:
    """Return what we use of a chrome trace. Raises ValueError for any other text.

    Events are decoded one by one: all at once they would take ten times the room.
    """
    trace = ChromeTrace()
    by_kind = {OPERATOR: trace.operators, FRAME: trace.frames, ANNOTATION: trace.annotations}
    for event in _events(text):
        trace.events += 1
        kind, phase = event.get("cat"), event.get("ph")
        if phase == "X" and kind in by_kind:
            start, duration, thread = _times(event)
            if thread is not None:
                span = TraceSpan(start, start + duration, str(event.get("name")), _link(event))
                by_kind[kind].setdefault(thread, []).append(span)
        elif phase == "X" and kind in GPU_WORK:
            duration = max(0.0, _number(event.get("dur")) or 0.0)
            trace.gpu.append(GpuActivity(duration, _link(event), _link(event, "correlation")))
        elif phase == "X" and kind in LAUNCHES:
            call, at = _link(event, "correlation"), _number(event.get("ts"))
            if call is not None and at is not None:
                trace.launches[call] = at
        elif event.get("name") == MEMORY:
            _add_allocation(trace, event)
    for spans in (*trace.operators.values(), *trace.frames.values(), *trace.annotations.values()):
        spans.sort(key=lambda span: (span.start_us, -span.end_us))
    return trace


def parents(spans: list[TraceSpan]) -> list[int]:
    """Return for each span of one thread the index of the one around it, -1 for none.

    `spans` are in order of time, an enclosing span before its parts.
    """
    found, around = [], list[int]()
    for index, span in enumerate(spans):
        while around and spans[around[-1]].end_us <= span.start_us:
            around.pop()
        found.append(around[-1] if around else -1)
        around.append(index)
    return found


def self_times(spans: list[TraceSpan], parent: list[int]) -> list[float]:
    """Return the microseconds that each span spent outside of the spans within it."""
    times = [span.end_us - span.start_us for span in spans]
    for index, outer in enumerate(parent):
        if outer >= 0:
            inside = min(spans[index].end_us, spans[outer].end_us) - spans[index].start_us
            times[outer] -= inside
    return [max(0.0, time) for time in times]


def without(spans: list[TraceSpan], cut: list[tuple[float, float]]) -> list[TraceSpan]:
    """Return the spans that begin in none of the intervals; all in order of time."""
    starts = [start_us for start_us, _ in cut]
    kept = []
    for span in spans:
        index = bisect_right(starts, span.start_us) - 1
        if index < 0 or span.start_us >= cut[index][1]:
            kept.append(span)
    return kept


def leave_out_own(trace: ChromeTrace, thread: int) -> list[tuple[float, float]]:
    """Take what Stepscope did at step boundaries out of this thread; return when that was.

    The frames that serve the page are known by their names; without frames nothing is found.
    """
    own = [(span.start_us, span.end_us) for span in trace.frames.get(thread, []) if _OWN(span.name)]
    for group in (trace.operators, trace.frames, trace.annotations):
        if thread in group:
            group[thread] = without(group[thread], own)
    return own


def main_thread(trace: ChromeTrace, wanted: int | None = None) -> int | None:
    """Return the thread that trains: `wanted` if it is there, else the one with most operators."""
    if wanted in trace.operators:
        return wanted
    return max(trace.operators, key=lambda tid: len(trace.operators[tid]), default=None)


def extent_us(groups: Iterable[list[TraceSpan]]) -> tuple[float, float]:
    """Return the first start and the last end of sorted spans, two zeros without any."""
    there = [spans for spans in groups if spans]
    if not there:
        return 0.0, 0.0
    return min(s[0].start_us for s in there), max(span.end_us for s in there for span in s)


def _events(text: str) -> Iterator[dict[str, Any]]:
    at = text.find('"traceEvents"')
    at = text.find("[", at) + 1 if at >= 0 else 0
    if not at:
        raise ValueError("no chrome trace: it has no list traceEvents")
    decode = json.JSONDecoder(strict=False).raw_decode
    while True:
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
        if text[at : at + 1] == "]":
            return
        event, at = decode(text, at)
        if isinstance(event, dict):
            yield event


def _times(event: dict[str, Any]) -> tuple[float, float, int | None]:
    """Return start and duration in microseconds and the thread; None where one is missing."""
    start, duration, thread = _number(event.get("ts")), _number(event.get("dur")), event.get("tid")
    if start is None or duration is None or type(thread) is not int:
        return 0.0, 0.0, None
    return start, max(0.0, duration), thread


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def _link(event: dict[str, Any], key: str = "External id") -> int | None:
    args = event.get("args")
    link = args.get(key) if isinstance(args, dict) else None
    return link if type(link) is int else None


def _add_allocation(trace: ChromeTrace, event: dict[str, Any]) -> None:
    args, thread, at = event.get("args"), event.get("tid"), _number(event.get("ts"))
    if not isinstance(args, dict) or type(thread) is not int or at is None:
        return
    size, kind = args.get("Bytes"), args.get("Device Type")
    if type(size) is int and type(kind) is int:
        trace.allocations.setdefault(thread, []).append(MemoryEvent(at, size, kind))
