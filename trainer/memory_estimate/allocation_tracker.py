"""Writes down each allocation of a step that is played on fake tensors, and each release.

A tensor's memory is its storage: views share one, and it lives as long as anybody holds it,
autograd included. Not covered: memory that a kernel takes and gives back within one
operation. `workspaces.py` knows the larger cases of that; the tracker asks it at each operation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Part(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"  # buffers, such as the statistics of batch norm, too
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"  # what the forward pass made
    INPUTS = "inputs"  # batches and data on the device
    TEMPORARY = "temporary"  # of the backward pass and of the optimizer
    WORKSPACE = "workspace"  # of libraries and kernels


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (`size` above 0) or its release (-`size`) of the memory with this number."""

    number: int
    size: int
    pool: str = ""
    """The allocator's pool: "" or that of a CUDA graph."""


Scratch = Callable[["Tracker", Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Counts what an operation takes beside its results; takes (tracker, operation, args, kwargs,
results)."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The allocations on one device while it is entered; enter it after the fake mode."""

    def __init__(self, device: torch.device, scratch: Scratch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.parts: dict[int, Part] = {}
        self.part: Part | None = None
        """What allocations are for from now on; None: judged by whether autograd works."""
        self.pool = ""
        self._device = device
        self._scratch = scratch
        self._known: dict[int, tuple[int, Any]] = {}
        self._next = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self.note(result)
        if self._scratch is not None:  # after the results: a kernel has both
            self._scratch(self, func, args, kwargs, results)
        return results

    def note(self, tensor: Tensor, part: Part | None = None) -> None:
        """Count a tensor's memory, once; with `part` also say what it is for."""
        if tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            size = storage.nbytes()
            number = self._allocate(size, part or self._current())
            gone = functools.partial(self._forget, key, size)
            self._known[key] = number, weakref.ref(storage, gone)
        elif part is not None:
            self.parts[self._known[key][0]] = part

    def take(self, size: int, part: Part) -> Callable[[], None]:
        """Count memory that no tensor holds; return what releases it."""
        number = self._allocate(size, part)
        pool = self.pool
        return lambda: self.events.append(Event(number, -size, pool))

    def passing(self, size: int) -> None:
        """Count memory that is taken and given back at once."""
        self.take(size, Part.WORKSPACE)()

    @contextmanager
    def for_part(self, part: Part | None) -> Iterator[None]:
        """Say what allocations within are for."""
        former, self.part = self.part, part
        try:
            yield
        finally:
            self.part = former

    def _current(self) -> Part:
        if self.part is not None:
            return self.part
        return Part.TEMPORARY if in_backward() else Part.ACTIVATIONS

    def _allocate(self, size: int, part: Part) -> int:
        number, self._next = self._next, self._next + 1
        self.parts[number] = part
        self.events.append(Event(number, size, self.pool))
        return number

    def _forget(self, key: int, size: int, _: object) -> None:
        number, _ = self._known.pop(key)
        self.events.append(Event(number, -size, self.pool))


def in_backward() -> bool:
    """Say whether autograd calls this operation, on a GPU in a thread of its own."""
    return bool(torch._C._current_graph_task_id() != -1)
