"""Time and memory by operator (as `key_averages`) and by phase, and the flame graph. Pure."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from stepscope.profiling.chrome_trace import (
    CPU,
    CUDA,
    NONE,
    ChromeTrace,
    TraceSpan,
    parents,
    self_times,
)
from stepscope.profiling.phase_ranges import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES

Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
Bytes = Annotated[int, msgspec.Meta(ge=-(2**60), le=2**60)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**60)]


@dataclass(slots=True)
class OperatorStats:
    """All calls of one operator; times in microseconds, memory in bytes.

    "Self" excludes the operators within it, and so does memory: allocated less freed bytes, which
    may be negative.
    """

    name: str
    calls: Count = 0
    cpu_self_us: Number = 0.0
    cpu_total_us: Number = 0.0
    cuda_self_us: Number = 0.0
    cuda_total_us: Number = 0.0
    cpu_memory: Bytes = 0
    cuda_memory: Bytes = 0


def operators(trace: ChromeTrace) -> list[OperatorStats]:
    """Return the operators, the most self time (CPU and CUDA) first."""
    stats: dict[str, OperatorStats] = {}
    gpu_us = defaultdict[int, float](float)
    for work in trace.gpu:
        gpu_us[work.args.link] += work.duration_us
    gpu_us.pop(NONE, None)
    for thread, spans in trace.operators.items():
        outer = parents(spans)
        _add_thread(stats, spans, outer, gpu_us)
        _add_memory(stats, spans, outer, trace.allocations.get(thread, []))
    return sorted(stats.values(), key=lambda op: -(op.cpu_self_us + op.cuda_self_us))


def _add_thread(
    stats: dict[str, OperatorStats],
    spans: list[TraceSpan],
    outer: list[int],
    gpu_us: Mapping[int, float],
) -> None:
    for index, (span, own_us) in enumerate(zip(spans, self_times(spans, outer), strict=True)):
        operator = stats.setdefault(span.name, OperatorStats(span.name))
        # An overload that only calls the operator again is the same call.
        operator.calls += outer[index] < 0 or spans[outer[index]].name != span.name
        operator.cpu_self_us += own_us
        around, above = set[str](), index
        while (above := outer[above]) >= 0:
            around.add(spans[above].name)
        if span.name not in around:  # a recursive call lies within the total already
            operator.cpu_total_us += span.duration_us
        started_us = gpu_us.get(span.args.link, 0.0)
        if started_us:
            operator.cuda_self_us += started_us
            for name in around | {span.name}:
                stats[name].cuda_total_us += started_us


def _add_memory(
    stats: dict[str, OperatorStats],
    spans: list[TraceSpan],
    outer: list[int],
    allocations: list[TraceSpan],
) -> None:
    starts = [span.start_us for span in spans]
    for allocation in allocations:
        index = bisect_right(starts, allocation.start_us) - 1
        while index >= 0 and spans[index].end_us < allocation.start_us:
            index = outer[index]
        if index >= 0:
            operator = stats[spans[index].name]
            if allocation.args.device_type == CPU:
                operator.cpu_memory += allocation.args.size
            elif allocation.args.device_type == CUDA:
                operator.cuda_memory += allocation.args.size


NODES_LIMIT = 20_000
DEPTH_LIMIT = 400
NAME_LIMIT = 200

# The names of built-in functions have an address, and those of torch's classes a long prefix.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_BINDING = re.compile(r" of pybind11_builtins\.\w+ object")
# Between a module's call and its `forward` torch has two functions, and `phase_ranges` one.
_CALL = re.compile(
    r"torch/nn/modules/module\.py\(\d+\): (_wrapped_call_impl|_call_impl)$"
    r"|stepscope/profiling/(phase_)?ranges\.py\("
)


@dataclass(slots=True)
class FlameGraph:
    """Nodes, each after its parent.

    Node i is `names[name[i]]` below `parent[i]` (-1: none). Its `calls[i]` calls took `total_us[i]`
    microseconds, callees included.
    """

    names: list[str] = field(default_factory=list)
    name: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    total_us: list[Time] = field(default_factory=list)
    calls: list[Count] = field(default_factory=list)
    left_out: Count = 0  # Number of smaller nodes.


def fold(trace: ChromeTrace, thread: int, limit: int = NODES_LIMIT) -> FlameGraph:
    """Return the `limit` largest nodes of the training thread and of torch's threads.

    Stacks are Python frames with operators at their ends. Another thread of torch, such as that of
    `backward()` on a GPU, has operators alone, in a separate root node.
    """
    nodes: dict[tuple[int, str], int] = {}
    total_us, calls = defaultdict[int, float](float), defaultdict[int, int](int)
    for tid in [thread, *(other for other in trace.operators if other != thread)]:
        spans = [*trace.operators.get(tid, [])]
        root = -1
        if tid == thread:
            spans += [span for span in trace.frames.get(tid, []) if not _CALL.search(span.name)]
        else:
            root = nodes.setdefault((-1, "another thread of torch"), len(nodes))
            calls[root] = 1
        spans.sort(key=lambda span: (span.start_us, -span.duration_us))
        around: list[tuple[float, int]] = []
        for span in spans:
            while around and around[-1][0] <= span.start_us:
                around.pop()
            if len(around) >= DEPTH_LIMIT:
                continue
            until_us, parent = around[-1] if around else (math.inf, root)
            node = nodes.setdefault((parent, _name(span.name)), len(nodes))
            end_us = min(span.end_us, until_us)
            calls[node] += 1
            for counted in {node, root} if parent == root >= 0 else {node}:
                total_us[counted] += end_us - span.start_us
            around.append((end_us, node))
    # Among equal nodes a parent comes first, and a node is never larger than its parent.
    order = sorted(range(len(nodes)), key=lambda node: (-total_us[node], node))
    place, names, keys = {-1: -1}, dict[str, int](), list(nodes)
    flame = FlameGraph(left_out=max(0, len(nodes) - limit))
    for node in sorted(order[:limit]):
        place[node] = len(flame.parent)
        flame.parent.append(place[keys[node][0]])
        flame.name.append(names.setdefault(keys[node][1], len(names)))
        flame.total_us.append(total_us[node])
        flame.calls.append(calls[node])
    flame.names = list(names)
    return flame


def _name(name: str) -> str:
    return _BINDING.sub(" of torch", _ADDRESS.sub("", name))[:NAME_LIMIT]


_Part = tuple[str, float, float]  # A phase, and its start and end in microseconds.
_LEFT_OUT = ""

_BACKWARD = re.compile(r"torch/autograd/__init__\.py\(\d+\): (backward|grad)$")


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Microseconds by phase and `other`: of the training thread, and of the GPU work it started."""

    cpu_us: dict[str, Time]
    cuda_us: dict[str, Time]


def phases(
    trace: ChromeTrace, thread: int, left_out: Sequence[tuple[float, float]] = ()
) -> PhaseTimes:
    """Return the phases of the training thread, without the spans `left_out`.

    Of nested phases the outer one counts. An exception is `Optimizer.step`, which may call a
    closure that computes the loss, as in Lightning: there the inner phases count.
    """
    spans = [group.get(thread, []) for group in (trace.annotations, trace.frames, trace.operators)]
    named = ((phase_of(span.name), span) for span in (*spans[0], *spans[1]))
    marks = sorted(
        ((phase, span.start_us, span.end_us) for phase, span in named if phase),
        key=lambda mark: (mark[1], -mark[2]),
    )
    parts: list[_Part] = [
        *_outermost(mark for mark in marks if mark[0] == OPTIMIZER),
        *_outermost(mark for mark in marks if mark[0] != OPTIMIZER),
        *((_LEFT_OUT, start_us, end_us) for start_us, end_us in left_out),
    ]
    extent = {at_us for group in spans for span in group for at_us in (span.start_us, span.end_us)}
    limits = (min(extent), max(extent)) if extent else ()
    edges = sorted({*limits, *(at_us for part in parts for at_us in part[1:])})
    phase_at = [OTHER] * len(edges)  # The phase from each edge to the next one.
    for phase, start_us, end_us in parts:
        first, last = bisect_left(edges, start_us), bisect_left(edges, end_us)
        phase_at[first:last] = [phase] * (last - first)
    cpu_us = dict.fromkeys((*PHASES, OTHER, _LEFT_OUT), 0.0)
    for phase, start_us, end_us in zip(phase_at, edges, edges[1:], strict=False):
        cpu_us[phase] += end_us - start_us
    del cpu_us[_LEFT_OUT]
    return PhaseTimes(cpu_us, _cuda_us(trace, edges, phase_at))


def phase_of(name: str) -> str | None:
    """Return the phase of a range or Python frame by its name, or None."""
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


def _cuda_us(trace: ChromeTrace, edges: list[float], phase_at: list[str]) -> dict[str, float]:
    """Return GPU time by the phase in which any thread started the work.

    The work starts with its CUDA call, or else with its operator: a compiled model, or a replayed
    graph, starts kernels without an operator.
    """
    operators = (span for spans in trace.operators.values() for span in spans)
    started = {span.args.link: span.start_us for span in operators if span.args.link != NONE}
    cuda_us = dict.fromkeys((*PHASES, OTHER), 0.0)
    for work in trace.gpu:
        at_us = started.get(work.args.link, -math.inf)
        at_us = trace.launches.get(work.args.call, at_us)
        index = bisect_right(edges, at_us) - 1
        phase = phase_at[index] if index >= 0 else OTHER
        cuda_us[OTHER if phase == _LEFT_OUT else phase] += work.duration_us
    return cuda_us
