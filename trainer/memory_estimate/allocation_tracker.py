"""Records the allocations and releases of a step that is simulated on fake tensors.

The memory of a tensor is its storage, which views share and autograd can keep alive. Temporary
memory of an operation is not recorded; `workspaces.py` has its larger cases.
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

from stepscope.settings.autocast import in_backward


class AllocationCategory(StrEnum):
    """Categories of memory."""

    PARAMETERS = "parameters"  # and buffers, such as the statistics of batch norm
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"  # of the forward pass
    INPUTS = "inputs"  # batches and data on the device
    TEMPORARY = "temporary"  # of the backward pass and the optimizer
    WORKSPACE = "workspace"  # of libraries and kernels


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """An allocation (`size` above 0) or its release (-`size`) of the memory with this number.

    `pool` is the allocator's: "" or that of a CUDA graph.
    """

    number: int
    size: int
    pool: str = ""


Workspaces = Callable[["AllocationTracker", Any, tuple[Any, ...], Any], None]
"""Adds the workspaces of an operation: (tracker, operation, args, results)."""


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the allocations on one device while active; enter it after the fake mode.

    `part` is the category of new allocations; None: activations or temporary.
    """

    def __init__(self, device: torch.device, workspaces: Workspaces | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[AllocationEvent] = []
        self.parts: dict[int, AllocationCategory] = {}
        self.part: AllocationCategory | None = None
        self.pool = ""
        self._device = device
        self._workspaces = workspaces
        self._known: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self.note(result)
        if self._workspaces is not None:  # after the results: a kernel has both
            self._workspaces(self, func, args, results)
        return results

    def note(self, tensor: Tensor, part: AllocationCategory | None = None) -> None:
        """Record a tensor's memory, once; `part` sets its category."""
        if tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            kind = AllocationCategory.TEMPORARY if in_backward() else AllocationCategory.ACTIVATIONS
            release = self.take(storage.nbytes(), part or self.part or kind)
            gone = functools.partial(self._forget, key, release)
            self._known[key] = len(self.parts) - 1, weakref.ref(storage, gone)
        elif part is not None:
            self.parts[self._known[key][0]] = part

    def take(self, size: int, part: AllocationCategory) -> Callable[[], None]:
        """Record an allocation; return the function that records its release."""
        number = len(self.parts)
        self.parts[number] = part
        pool = self.pool
        self.events.append(AllocationEvent(number, size, pool))
        return lambda: self.events.append(AllocationEvent(number, -size, pool))

    @contextmanager
    def for_part(self, part: AllocationCategory | None) -> Iterator[None]:
        """Set the category of allocations within."""
        former, self.part = self.part, part
        try:
            yield
        finally:
            self.part = former

    def _forget(self, key: int, release: Callable[[], None], _: object) -> None:
        del self._known[key]
        release()
