"""Names the parts of a step while somebody looks: in a profile, and as NVTX ranges on a GPU.

A history of allocations has them too (`stepscope/memory/snapshots/recording.py`).
`span` is called in every step, so while nobody looks it does nothing at all. NVTX ranges are what
Nsight Systems shows as rows; they are emitted during a profile on CUDA and under Nsight itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES = ("data", "forward", "backward", "optimizer")


OTHER = "other"


__all__ = [
    "BACKWARD",
    "DATA",
    "FORWARD",
    "OPTIMIZER",
    "begin",
    "end",
    "label",
    "span",
    "under_nsight",
]

NSIGHT = "NSYS_PROFILING_SESSION_ID"
"""Set by `nsys` in what it profiles."""

_OFF: AbstractContextManager[None] = nullcontext()
_Emit = Callable[[str], AbstractContextManager[None]]


def under_nsight() -> bool:
    """Say whether Nsight Systems profiles this process."""
    return NSIGHT in os.environ


def span(name: str) -> AbstractContextManager[None]:
    """Name the code within, such as `with span(BACKWARD): loss.backward()`.

    Of two such spans, one within the other, the outer one counts.
    """
    return _OFF if _emit is None else _emit(name)


def begin(*, nvtx: bool) -> None:
    """Emit ranges from now on, of the calling thread alone; `nvtx` needs a CUDA build of torch."""
    global _ranges
    thread = threading.get_ident()
    record = sys.modules["torch"].profiler.record_function
    is_open = False

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        nonlocal is_open
        is_open = True
        try:
            with _nvtx(name) if nvtx else _OFF, record(name):
                yield
        finally:
            is_open = False

    def emit(name: str) -> AbstractContextManager[None]:
        return _OFF if is_open or threading.get_ident() != thread else marked(name)

    _ranges = emit
    _choose()


def end() -> None:
    """Emit no more ranges, but those for Nsight Systems."""
    global _ranges
    _ranges = _nvtx if under_nsight() else None
    _choose()


def label(emit: _Emit | None) -> None:
    """Have `span` call this too, beside the ranges; None ends it."""
    global _labels
    _labels = emit
    _choose()


def _choose() -> None:
    global _emit
    _emit = _ranges or _labels if _ranges is None or _labels is None else _both


@contextmanager
def _both(name: str) -> Iterator[None]:
    ranges, labels = _ranges or _quiet, _labels or _quiet  # one may end just now
    with labels(name), ranges(name):
        yield


def _quiet(name: str) -> AbstractContextManager[None]:
    return _OFF


@contextmanager
def _nvtx(name: str) -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


_ranges: _Emit | None = None
_labels: _Emit | None = None
_emit: _Emit | None = None
"""What `span` calls: the one of the two that is on, or both."""
end()
