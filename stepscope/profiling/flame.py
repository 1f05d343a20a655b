"""The stacks of a profile, folded: calls of one function from one place are one node. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepscope.profiling.chrome_trace import Span, Trace

NODES_LIMIT = 20_000
DEPTH_LIMIT = 400
NAME_LIMIT = 200

# The names of built-in functions have an address, and those of torch's own classes a long word.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_BINDING = re.compile(r" of pybind11_builtins\.\w+ object")
# Between a module's call and its `forward` torch has two functions of its own, and our ranges one.
_CALL = re.compile(
    r"torch/nn/modules/module\.py\(\d+\): (_wrapped_call_impl|_call_impl)$"
    r"|stepscope/profiling/ranges\.py\("
)


@dataclass(slots=True)
class Flame:
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


def fold(trace: Trace, thread: int, limit: int = NODES_LIMIT) -> Flame:
    """Return the largest nodes of the training thread, and of torch's threads beside it.

    Frames of Python are the stacks, operators their ends. A thread of torch, as the one in which
    `backward()` runs on a GPU, has operators alone and stands in a node of its own.
    """
    flame = Flame()
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
    flame: Flame,
    known: dict[tuple[int, str], int],
    index: dict[str, int],
    spans: Iterable[Span],
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
    flame: Flame, known: dict[tuple[int, str], int], index: dict[str, int], parent: int, name: str
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


def _largest(flame: Flame, limit: int) -> Flame:
    """Keep so many nodes. A node is never larger than the one around it, which so stays too."""
    if len(flame.parent) <= limit:
        return flame
    # Of equal ones the first comes before what lies in it.
    order = sorted(range(len(flame.parent)), key=lambda node: (-flame.total_us[node], node))
    place: dict[int, int] = {-1: -1}
    kept, index = Flame(left_out=len(order) - limit), dict[str, int]()
    for node in sorted(order[:limit]):
        place[node] = _node(
            kept, {}, index, place[flame.parent[node]], flame.names[flame.name[node]]
        )
        kept.total_us[-1], kept.calls[-1] = flame.total_us[node], flame.calls[node]
    return kept
