"""Child processes of the server: lessons, memory estimates, measurements of collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer.runners.child_process import Child

C = TypeVar("C", bound=Child)


class ChildRuns(Generic[C]):
    """The child processes of one kind. One runs at a time; the last of each name is kept.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, C] = {}

    def start(self, make: Callable[[], C], name: str = "") -> bool:
        """Start a child process and keep it as the last one of `name`.

        Returns False, without starting it, while another one runs. Raises what `make` raises.
        """
        with self._lock:
            if self.running() is not None:
                return False
            self._last[name] = make()
            return True

    def last(self, name: str = "") -> C | None:
        """Return the last child process of this name; None before the first."""
        return self._last.get(name)

    def running(self) -> C | None:
        """Return the child process that runs now."""
        return next((child for child in list(self._last.values()) if child.running()), None)

    def drop(self, name: str = "") -> None:
        """Forget the last child process of this name, and end it if it still runs."""
        child = self._last.pop(name, None)
        if child is not None:
            child.stop()

    def close(self) -> None:
        """End the child process that runs."""
        for child in list(self._last.values()):
            child.stop()
