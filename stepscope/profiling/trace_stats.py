"""Time and memory by operator, as torch's `key_averages` counts them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from stepscope.profiling.chrome_trace import CPU, CUDA, Span, Trace, parents, self_times


@dataclass(slots=True)
class Operator:
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


def operators(trace: Trace) -> list[Operator]:
    """Return the operators, most time of their own (CPU and CUDA) first."""
    found: dict[str, Operator] = {}
    gpu_us: dict[int, float] = {}
    for work in trace.gpu:
        if work.link is not None:
            gpu_us[work.link] = gpu_us.get(work.link, 0.0) + work.duration_us
    for thread, spans in trace.operators.items():
        _add_thread(found, spans, gpu_us)
        _add_memory(found, spans, trace, thread)
    return sorted(found.values(), key=lambda op: -(op.cpu_self_us + op.cuda_self_us))


def _add_thread(found: dict[str, Operator], spans: list[Span], gpu_us: dict[int, float]) -> None:
    outer = parents(spans)
    for index, (span, own_us) in enumerate(zip(spans, self_times(spans, outer), strict=True)):
        operator = found.setdefault(span.name, Operator(span.name))
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


def _add_memory(found: dict[str, Operator], spans: list[Span], trace: Trace, thread: int) -> None:
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
