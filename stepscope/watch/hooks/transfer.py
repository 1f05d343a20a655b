"""Copies to the GPU: how long `.to()` and `.cuda()` of a CPU tensor take on the device.

Two CUDA events on the current stream bracket a copy and are read once the device has passed them;
nothing waits. The wrappers are put in place at the first optimizer step, and only where the
parameters are on a CUDA device: a run on the CPU does not pay for them, and a model on its way to
the GPU is not in the figure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import Any

from stepscope.recording.event_pairs import EventPairs, Pair
from stepscope.watch.hooks.patches import Function, Guard, Patches, opaque
from stepscope.watch.hooks.state import State

PAIRS = 64
"""Copies under way at a time whose duration is measured."""


class Transfers:
    """The copies of this run that the device has not finished."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._pairs = EventPairs(new_event, PAIRS)
        self._under_way: deque[Pair] = deque()
        self._missed = False

    def begin(self) -> Pair | None:
        """Record the first event of a pair; None when all are in use."""
        pair = self._pairs.begin()
        self._missed = self._missed or pair is None
        return pair

    def end(self, pair: Pair) -> None:
        """Record the second event."""
        self._pairs.end(pair)
        self._under_way.append(pair)

    def harvest(self) -> float | None:
        """Return the seconds of the copies that ended since the last call.

        None when a copy could not be measured, or when all are still under way: not known, not 0.
        """
        total_s, found = 0.0, False
        while self._under_way and self._pairs.has_ended(self._under_way[0]):
            total_s += self._pairs.seconds(self._under_way.popleft())
            found = True
        missed, self._missed = self._missed, False
        return None if missed or (self._under_way and not found) else total_s


class CopyTimes:
    """Puts a pair around every copy from the CPU to the current CUDA device."""

    def __init__(self, torch: ModuleType, state: State, transfers: Transfers) -> None:
        self._state = state
        self._transfers = transfers
        self._is_compiling = torch.compiler.is_compiling
        self._is_capturing = torch.cuda.is_current_stream_capturing
        self._current = torch.cuda.current_device
        self._device: type[Any] = torch.device
        self._tensor: type[Any] = torch.Tensor
        opaque(self._begin, with_callees=True)

    def around(self, original: Function, *, default: Any) -> Function:
        """Wrap a method of Tensor; `default` is its target where the call names none."""
        state, is_compiling, guard = self._state, self._is_compiling, Guard("perf/h2d")

        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not tensor.is_cpu or get_ident() != state.thread:
                return original(tensor, *args, **kwargs)
            target = kwargs.get("device", args[0] if args else default)
            pair = guard.call(self._begin, target)
            if pair is None:
                return original(tensor, *args, **kwargs)
            try:
                return original(tensor, *args, **kwargs)
            finally:
                guard.call(self._transfers.end, pair)

        return copy

    def _begin(self, target: Any) -> Pair | None:
        if isinstance(target, self._tensor):
            target = target.device
        elif isinstance(target, str):
            target = self._device(target)
        elif type(target) is int:
            target = self._device("cuda", target)
        if not isinstance(target, self._device) or target.type != "cuda":
            return None
        if target.index not in (None, self._current()) or self._is_capturing():
            return None
        return self._transfers.begin()


def attach(torch: ModuleType, state: State, patches: Patches) -> Transfers:
    """Wrap `Tensor.to` and `Tensor.cuda`; CUDA is in use already."""
    transfers = Transfers(lambda: torch.cuda.Event(enable_timing=True))
    times = CopyTimes(torch, state, transfers)
    patches.replace(torch.Tensor, "to", lambda f: times.around(f, default=None), traced=True)
    patches.replace(torch.Tensor, "cuda", lambda f: times.around(f, default="cuda"), traced=True)
    return transfers
