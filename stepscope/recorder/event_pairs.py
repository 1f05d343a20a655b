"""Times on a CUDA device by pairs of events, without waiting: asked only once both have passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepscope.recorder.cuda_readback import keep_for_good

Pair = tuple[Any, Any]
"""Two `torch.cuda.Event` that keep the time."""


class EventPairs:
    """The pairs of one device, each free or around work that it has not finished; used again.

    At most `limit` pairs are made, each when it is first needed. They are never freed.
    """

    def __init__(self, new_event: Callable[[], Any], limit: int) -> None:
        self._new_event = new_event
        self._free: list[Pair] = []
        self._left = limit

    def begin(self) -> Pair | None:
        """Record the first event of a pair on the current stream; None when all are in use."""
        if not self._free:
            if not self._left:
                return None
            self._left -= 1
            pair = self._new_event(), self._new_event()
            keep_for_good(pair)
        else:
            pair = self._free.pop()
        pair[0].record()
        return pair

    def end(self, pair: Pair) -> None:
        """Record the second event on the current stream."""
        pair[1].record()

    def has_ended(self, pair: Pair) -> bool:
        """Say whether the device has passed both events."""
        return bool(pair[1].query())

    def seconds(self, pair: Pair) -> float:
        """Return the time between the events of a pair that has ended, and free the pair.

        Raises what torch raises where it has not, or where the device failed: the pair stays taken.
        """
        seconds: float = pair[0].elapsed_time(pair[1]) / 1e3  # milliseconds
        self._free.append(pair)
        return seconds

    def free(self, pair: Pair) -> None:
        """Take back a pair that nobody will ask; a CUDA event may be recorded again at any time."""
        self._free.append(pair)
