"""Signal handlers of the script wait while its ending is written down.

A handler may raise, and then whatever the main thread is doing breaks off. The DataLoader's for
SIGCHLD does so when a worker was killed, often just after the script has failed over that worker.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Within it, signals are kept for later where Python code handles them; Ctrl-C is not.

    They are raised again at the end. Python runs handlers in the main thread alone: in any other
    one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept: dict[int, None] = {}

    def keep(number: int, _: FrameType | None) -> None:
        kept[number] = None

    former = {
        number: handler
        for number in signal.valid_signals() - {signal.SIGINT}
        if callable(handler := signal.getsignal(number))
    }
    for number in former:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for one in kept:
            signal.raise_signal(one)
