"""Name the phases of a step in a profile, as NVTX ranges on a GPU, and in an allocation history.

`span` is called in every step and does nothing without a recording. NVTX ranges, which are rows in
Nsight Systems, are emitted during a profile on CUDA and under Nsight itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES = ("data", "forward", "backward", "optimizer")

NSIGHT = "NSYS_PROFILING_SESSION_ID"  # Set by `nsys` in the processes that it profiles.

_OFF: AbstractContextManager[None] = nullcontext()
_Emit = Callable[[str], AbstractContextManager[None]]


def under_nsight() -> bool:
    """Return True if Nsight Systems profiles this process."""
    return NSIGHT in os.environ


def span(name: str) -> AbstractContextManager[None]:
    """Name the code within (the outer span counts): `with span(BACKWARD): loss.backward()`."""
    return _OFF if _ranges is None and _labels is None else _emitted(name)


@contextmanager
def _emitted(name: str) -> Iterator[None]:
    labels, ranges = _labels, _ranges  # another thread may end them
    with labels(name) if labels else _OFF, ranges(name) if ranges else _OFF:
        yield


def begin(*, nvtx: bool) -> None:
    """Start to emit ranges of the calling thread; `nvtx` needs a CUDA build of torch."""
    global _ranges
    record = sys.modules["torch"].profiler.record_function

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        with _nvtx(name) if nvtx else _OFF, record(name):
            yield

    _ranges = _outermost(marked)


def _outermost(emit: _Emit) -> _Emit:
    """Return a function that calls `emit` for the outermost spans of the calling thread."""
    thread, is_open = threading.get_ident(), False

    @contextmanager
    def opened(name: str) -> Iterator[None]:
        nonlocal is_open
        is_open = True
        try:
            with emit(name):
                yield
        finally:
            is_open = False

    return lambda name: _OFF if is_open or threading.get_ident() != thread else opened(name)


def end() -> None:
    """Stop emitting ranges, except for Nsight Systems."""
    global _ranges
    _ranges = _nvtx if under_nsight() else None


def label(emit: _Emit | None) -> None:
    """Make `span` call `emit` in addition to the ranges of this thread; None ends it."""
    global _labels
    _labels = None if emit is None else _outermost(emit)


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
end()
