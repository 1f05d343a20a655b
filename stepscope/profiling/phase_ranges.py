"""Name the phases of a step in a profile and in an allocation history.

`span` is called in every step and does nothing without a recording.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES = ("data", "forward", "backward", "optimizer")
OTHER = "other"

_OFF: AbstractContextManager[None] = nullcontext()
_Emit = Callable[[str], AbstractContextManager[None]]
_ranges: _Emit | None = None
_labels: _Emit | None = None


def span(name: str) -> AbstractContextManager[None]:
    """Name the code within, such as `with span(BACKWARD): loss.backward()`.

    Of nested spans the outer one counts.
    """
    ranges, labels = _ranges, _labels
    if ranges is None or labels is None:
        emit = ranges or labels
        return _OFF if emit is None else emit(name)
    return _both(labels(name), ranges(name))


def begin() -> None:
    """Start to emit ranges of the calling thread to torch's profiler."""
    global _ranges
    thread = threading.get_ident()
    record = sys.modules["torch"].profiler.record_function
    is_open = False

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        nonlocal is_open
        is_open = True
        try:
            with record(name):
                yield
        finally:
            is_open = False

    def emit(name: str) -> AbstractContextManager[None]:
        return _OFF if is_open or threading.get_ident() != thread else marked(name)

    _ranges = emit


def end() -> None:
    """Stop emitting ranges."""
    global _ranges
    _ranges = None


def label(emit: _Emit | None) -> None:
    """Make `span` call `emit` in addition to the ranges; None ends it."""
    global _labels
    _labels = emit


@contextmanager
def _both(
    outer: AbstractContextManager[None], inner: AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield
