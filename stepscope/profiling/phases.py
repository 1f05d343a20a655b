"""How much of the profiled time went to data, forward, backward and optimizer. Pure.

The parts are named by our ranges (`ranges.py`), and where a script has none, by what torch itself
marks: the DataLoader's `__next__`, `Optimizer.step`, the frames of `backward()` and of modules.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepscope.profiling.chrome_trace import Span, Trace, extent_us
from stepscope.profiling.z_phase_names import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES

_Part = tuple[str, float, float]
"""A phase, and its start and end in microseconds."""

_BACKWARD = re.compile(r"torch/autograd/__init__\.py\(\d+\): (backward|grad)$")


@dataclass(frozen=True, slots=True)
class Phases:
    """Microseconds by phase and `other`; together they are the profiled time."""

    cpu_us: dict[str, float]
    """Time of the training thread."""
    cuda_us: dict[str, float]
    """Time of the GPU work that the phase started."""


def phases(trace: Trace, thread: int, left_out: Sequence[tuple[float, float]] = ()) -> Phases:
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
    return Phases(cpu_us, _cuda_us(trace, parts))


def _marked(spans: Iterable[Span]) -> list[_Part]:
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


def _cuda_us(trace: Trace, parts: list[_Part]) -> dict[str, float]:
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
