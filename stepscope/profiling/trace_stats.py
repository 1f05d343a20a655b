"""Time and memory by operator and by phase of a step, and the flame graph. Pure.

Operators are counted as torch's `key_averages` does.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stepscope.profiling.chrome_trace import (
    CPU,
    CUDA,
    ChromeTrace,
    TraceSpan,
    extent_us,
    parents,
    self_times,
)
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES


@dataclass(slots=True)
class OperatorStats:
    """All calls of one operator; times in microseconds, memory in bytes.

    "Self" leaves out what the operators within it took. Memory is what was taken less what was
    given back while the operator itself ran, so it may be negative.
    """

    name: str
    calls: int = 0
    cpu_self_us: float = 0.0
    cpu_total_us: float = 0.0
    cuda_self_us: float = 0.0
    cuda_total_us: float = 0.0
    cpu_memory: int = 0
    cuda_memory: int = 0


def operators(trace: ChromeTrace) -> list[OperatorStats]:
    """Return the operators, most time of their own (CPU and CUDA) first."""
    found: dict[str, OperatorStats] = {}
    gpu_us: dict[int, float] = {}
    for work in trace.gpu:
        if work.link is not None:
            gpu_us[work.link] = gpu_us.get(work.link, 0.0) + work.duration_us
    for thread, spans in trace.operators.items():
        _add_thread(found, spans, gpu_us)
        _add_memory(found, spans, trace, thread)
    return sorted(found.values(), key=lambda op: -(op.cpu_self_us + op.cuda_self_us))


def _add_thread(
    found: dict[str, OperatorStats], spans: list[TraceSpan], gpu_us: dict[int, float]
) -> None:
    outer = parents(spans)
    for index, (span, own_us) in enumerate(zip(spans, self_times(spans, outer), strict=True)):
        operator = found.setdefault(span.name, OperatorStats(span.name))
        # An overload that only calls the operator again is the same call.
        operator.calls += outer[index] < 0 or spans[outer[index]].name != span.name
        operator.cpu_self_us += own_us
        around = {spans[above].name for above in _ancestors(outer, index)}
        if span.name not in around:  # a recursive call lies within the total already
            operator.cpu_total_us += span.end_us - span.start_us
        started_us = gpu_us.get(span.link, 0.0) if span.link is not None else 0.0
        if started_us:
            operator.cuda_self_us += started_us
            for name in around | {span.name}:
                found[name].cuda_total_us += started_us


def _add_memory(
    found: dict[str, OperatorStats], spans: list[TraceSpan], trace: ChromeTrace, thread: int
) -> None:
    outer, starts = parents(spans), [span.start_us for span in spans]
    for allocation in trace.allocations.get(thread, []):
        index = bisect_right(starts, allocation.at_us) - 1
        while index >= 0 and spans[index].end_us < allocation.at_us:
            index = outer[index]
        if index >= 0:
            operator = found[spans[index].name]
            if allocation.device_type == CPU:
                operator.cpu_memory += allocation.size
            elif allocation.device_type == CUDA:
                operator.cuda_memory += allocation.size


def _ancestors(outer: list[int], index: int) -> Iterator[int]:
    while (index := outer[index]) >= 0:
        yield index


NODES_LIMIT = 20_000
DEPTH_LIMIT = 400
NAME_LIMIT = 200

# The names of built-in functions have an address, and those of torch's own classes a long word.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_BINDING = re.compile(r" of pybind11_builtins\.\w+ object")
# Between a module's call and its `forward` torch has two functions of its own, and our ranges one.
_CALL = re.compile(
    r"torch/nn/modules/module\.py\(\d+\): (_wrapped_call_impl|_call_impl)$"
    r"|stepscope/profiling/(phase_)?ranges\.py\("
)


@dataclass(slots=True)
class FlameGraph:
    """Nodes in an order in which each comes after the one around it.

    Node i has the name `names[name[i]]`, lies in node `parent[i]` (-1: in none), and took
    `total_us[i]` microseconds in `calls[i]` calls, with all that it called.
    """

    names: list[str] = field(default_factory=list)
    name: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    total_us: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    left_out: int = 0
    """Nodes that were too small to be kept."""


def fold(trace: ChromeTrace, thread: int, limit: int = NODES_LIMIT) -> FlameGraph:
    """Return the largest nodes of the training thread, and of torch's threads beside it.

    Frames of Python are the stacks, operators their ends. A thread of torch, as the one in which
    `backward()` runs on a GPU, has operators alone and stands in a node of its own.
    """
    flame = FlameGraph()
    known: dict[tuple[int, str], int] = {}
    index: dict[str, int] = {}
    for tid in [thread, *(other for other in trace.operators if other != thread)]:
        spans = [*trace.operators.get(tid, [])]
        root = -1
        if tid == thread:
            spans += [span for span in trace.frames.get(tid, []) if not _CALL.search(span.name)]
        else:
            root = _node(flame, known, index, -1, "another thread of torch")
        spans.sort(key=lambda span: (span.start_us, -span.end_us))
        _fold(flame, known, index, spans, root)
    return _largest(flame, limit)


def _fold(
    flame: FlameGraph,
    known: dict[tuple[int, str], int],
    index: dict[str, int],
    spans: Iterable[TraceSpan],
    root: int,
) -> None:
    around: list[tuple[float, int]] = []
    for span in spans:
        while around and around[-1][0] <= span.start_us:
            around.pop()
        if len(around) >= DEPTH_LIMIT:
            continue
        parent = around[-1][1] if around else root
        node = _node(flame, known, index, parent, _name(span.name))
        end_us = min(span.end_us, around[-1][0]) if around else span.end_us
        flame.total_us[node] += end_us - span.start_us
        flame.calls[node] += 1
        if root >= 0 and not around:
            flame.total_us[root] += end_us - span.start_us
            flame.calls[root] = 1
        around.append((end_us, node))


def _node(
    flame: FlameGraph,
    known: dict[tuple[int, str], int],
    index: dict[str, int],
    parent: int,
    name: str,
) -> int:
    node = known.get((parent, name))
    if node is None:
        node = known[parent, name] = len(flame.parent)
        if name not in index:
            index[name] = len(flame.names)
            flame.names.append(name)
        flame.name.append(index[name])
        flame.parent.append(parent)
        flame.total_us.append(0.0)
        flame.calls.append(0)
    return node


def _name(name: str) -> str:
    return _BINDING.sub(" of torch", _ADDRESS.sub("", name))[:NAME_LIMIT]


def _largest(flame: FlameGraph, limit: int) -> FlameGraph:
    """Keep so many nodes. A node is never larger than the one around it, which so stays too."""
    if len(flame.parent) <= limit:
        return flame
    # Of equal ones the first comes before what lies in it.
    order = sorted(range(len(flame.parent)), key=lambda node: (-flame.total_us[node], node))
    place: dict[int, int] = {-1: -1}
    kept, index = FlameGraph(left_out=len(order) - limit), dict[str, int]()
    for node in sorted(order[:limit]):
        place[node] = _node(
            kept, {}, index, place[flame.parent[node]], flame.names[flame.name[node]]
        )
        kept.total_us[-1], kept.calls[-1] = flame.total_us[node], flame.calls[node]
    return kept


_Part = tuple[str, float, float]
"""A phase, and its start and end in microseconds."""

_BACKWARD = re.compile(r"torch/autograd/__init__\.py\(\d+\): (backward|grad)$")


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Microseconds by phase and `other`; together they are the profiled time."""

    cpu_us: dict[str, float]
    """Time of the training thread."""
    cuda_us: dict[str, float]
    """Time of the GPU work that the phase started."""


def phases(
    trace: ChromeTrace, thread: int, left_out: Sequence[tuple[float, float]] = ()
) -> PhaseTimes:
    """Return the phases of the thread that trains, without the times that are `left_out`.

    A phase within another one is part of that. But `Optimizer.step` may be given a closure that
    computes the loss, as Lightning does: what lies within it counts as what it is.
    """
    spans = [group.get(thread, []) for group in (trace.annotations, trace.frames, trace.operators)]
    begin_us, end_us = extent_us(spans)
    marks = _marked((*spans[0], *spans[1]))
    inner = _outermost(mark for mark in marks if mark[0] != OPTIMIZER)
    steps = _outermost(mark for mark in marks if mark[0] == OPTIMIZER)
    own = [(OTHER, start_us, stop_us) for start_us, stop_us in left_out]
    parts = _without([*inner, *_without(steps, inner)], own)
    parts.sort(key=lambda part: part[1])
    cpu_us = dict.fromkeys((*PHASES, OTHER), 0.0)
    for phase, start_us, stop_us in parts:
        cpu_us[phase] += stop_us - start_us
    own_us = sum(stop_us - start_us for _, start_us, stop_us in own)
    cpu_us[OTHER] = max(0.0, end_us - begin_us - own_us - sum(cpu_us.values()))
    return PhaseTimes(cpu_us, _cuda_us(trace, parts))


def _marked(spans: Iterable[TraceSpan]) -> list[_Part]:
    """Return phase, start and end of each span that is one, in order of time."""
    found = [
        (phase, span.start_us, span.end_us) for span in spans if (phase := phase_of(span.name))
    ]
    return sorted(found, key=lambda mark: (mark[1], -mark[2]))


def phase_of(name: str) -> str | None:
    """Return the phase that a range, or a frame of Python, stands for."""
    if name in PHASES:
        return name
    if name.startswith("enumerate(DataLoader)#"):
        return DATA
    if name.startswith("Optimizer.step#"):
        return OPTIMIZER
    if name.startswith("nn.Module: "):
        return FORWARD
    return BACKWARD if _BACKWARD.search(name) else None


def _outermost(marks: Iterable[_Part]) -> list[_Part]:
    kept: list[_Part] = []
    until_us = -math.inf
    for phase, start_us, end_us in marks:
        if start_us >= until_us:
            kept.append((phase, start_us, end_us))
            until_us = end_us
    return kept


def _without(parts: list[_Part], cut: list[_Part]) -> list[_Part]:
    """Return what is left of the parts where `cut`, in order of time, is taken out."""
    left, first = [], 0
    for phase, start_us, end_us in sorted(parts, key=lambda part: part[1]):
        while first < len(cut) and cut[first][2] <= start_us:
            first += 1
        at_us = start_us
        for _, cut_us, cut_end_us in cut[first:]:
            if cut_us >= end_us:
                break
            if cut_us > at_us:
                left.append((phase, at_us, cut_us))
            at_us = max(at_us, cut_end_us)
        if at_us < end_us:
            left.append((phase, at_us, end_us))
    return left


def _cuda_us(trace: ChromeTrace, parts: list[_Part]) -> dict[str, float]:
    """Sort GPU work by when it was started, in whichever thread: `backward` has one of torch's.

    That is the time of the call of CUDA, or else of the operator: a compiled model, or a replayed
    graph, starts kernels without one.
    """
    started = {
        span.link: span.start_us
        for spans in trace.operators.values()
        for span in spans
        if span.link is not None
    }
    starts = [start_us for _, start_us, _ in parts]
    cuda_us = dict.fromkeys((*PHASES, OTHER), 0.0)
    for work in trace.gpu:
        at_us = trace.launches.get(work.call) if work.call is not None else None
        if at_us is None and work.link is not None:
            at_us = started.get(work.link)
        index = bisect_right(starts, at_us) - 1 if at_us is not None else -1
        within = index >= 0 and at_us is not None and at_us <= parts[index][2]
        cuda_us[parts[index][0] if within else OTHER] += work.duration_us
    return cuda_us
