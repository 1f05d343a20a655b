"""Measure the model states at a step boundary: parameters, gradients, optimizer state.

The training thread measures at a boundary that the sampler requests, together with the allocator's
counters: only there the two are consistent. Gradients are those held then: all if the boundary is
inside `optimizer.step()`, as in a watched script, none after `zero_grad()`, as in the built-in one.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

log = logging.getLogger(__name__)

MAX_DEPTH = 4  # Maximum nesting of lists and dicts within the state of a parameter.
INTERVAL_S = 1.0  # Minimum interval between two measurements.
COOLDOWN = 500  # Minimum time to the next measurement, in multiples of its duration: 0.2%.
SEARCH_S, FIRST_SEARCH_S = 300.0, 2.0  # Between two searches; the second while none was found.
_NO_MEMORY = frozenset({"FakeTensor", "FunctionalTensor", "UninitializedParameter"})


class StorageBytes:
    """Adds up storages on `cuda_index` (None: the host) that are not already in `other`."""

    def __init__(self, cuda_index: int | None, other: StorageBytes | None = None) -> None:
        self.bytes = 0
        self.seen: set[int] = set()  # Addresses of the storages, as torch's C++ side has them.
        self._elsewhere: Collection[int] = other.seen if other is not None else ()
        self._index = cuda_index
        self._plain: set[type[Any]] = set()

    def add(self, tensors: Iterable[Any]) -> None:
        """Add the storages of these tensors. Raises torch's error for one without."""
        seen = self.seen
        elsewhere = self._elsewhere
        index = self._index
        for tensor in tensors:  # some 0.6 us each: a model may have thousands
            kind = type(tensor)
            if kind not in self._plain and not self._is_plain(kind):
                if kind.__name__ not in _NO_MEMORY:  # a wrapper that consists of other tensors
                    names, _ = tensor.__tensor_flatten__()
                    parts = [getattr(tensor, name) for name in names]
                    # A DTensor also names its mesh of devices.
                    self.add(part for part in parts if hasattr(part, "untyped_storage"))
                continue
            if not (tensor.is_cpu if index is None else tensor.is_cuda):
                continue
            if index is not None and tensor.get_device() != index:
                continue
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:
                if not tensor.is_sparse:
                    raise
                # Such as the gradient of an embedding.
                self.add((tensor._indices(), tensor._values()))
                continue
            key = storage._cdata
            if key not in seen and key not in elsewhere:
                seen.add(key)
                self.bytes += storage.nbytes()

    def _is_plain(self, kind: type[Any]) -> bool:
        """Return True for tensors with memory of their own, and remember their class."""
        if hasattr(kind, "__tensor_flatten__") or kind.__name__ in _NO_MEMORY:
            return False
        self._plain.add(kind)
        return True


def optimizer_parameters(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters of the optimizers; a parameter of two optimizers comes twice."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def module_parameters(modules: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters that these modules hold themselves; tied ones twice."""
    for module in modules:
        # A module whose constructor has not run has no such dict.
        parameters = vars(module).get("_parameters", {}).values()
        yield from (parameter for parameter in parameters if parameter is not None)


def gradients(parameters: Iterable[Any]) -> Iterator[Any]:
    """Yield the gradients that are held now."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            yield gradient


def optimizer_state(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors of the optimizers' states, also those in lists and dicts."""
    for optimizer in optimizers:
        yield from _tensors_in(optimizer.state, MAX_DEPTH + 2)


def _tensors_in(values: Any, depth: int) -> Iterator[Any]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if hasattr(value, "untyped_storage"):
            yield value
        elif depth > 1 and isinstance(value, (Mapping, list, tuple)):
            yield from _tensors_in(value, depth - 1)


def search() -> tuple[list[Any], list[Any]]:
    """Return the optimizers, and the modules of models. Training thread only.

    The training could not free an object that another thread held meanwhile. After gc.freeze()
    older objects are not found.
    """
    optimizer_kinds = with_subclasses("torch.optim.optimizer", "Optimizer")
    module_kinds = with_subclasses("torch.nn.modules.module", "Module")
    kinds = optimizer_kinds | module_kinds
    if not kinds:
        return [], []
    instances = instances_of(kinds)
    # An optimizer whose constructor has not run has neither of both.
    optimizers = [
        one
        for one in instances
        if type(one) in optimizer_kinds and {"param_groups", "state"} <= vars(one).keys()
    ]
    return optimizers, [one for one in instances if type(one) in module_kinds]


def instances_of(kinds: set[type[Any]]) -> list[Any]:
    """Return the tracked objects of exactly these classes.

    `gc.get_objects()` also returns tuples that other threads are still building from generators.
    A thread that comes to extend one while it is referenced here raises SystemError (CPython's
    bpo-15108), so no bytecode may run while they are: the types are collected by one call in C,
    and `gc.get_referrers` returns only what refers to a class, as each instance does.
    """
    types = set(map(type, chain.from_iterable(map(gc.get_objects, [None]))))
    return [one for one in gc.get_referrers(*(kinds & types)) if type(one) in kinds]


def with_subclasses(module: str, name: str) -> set[type[Any]]:
    """Return a class of torch and its subclasses; empty before the module is imported."""
    base = getattr(sys.modules.get(module), name, None)
    kinds: set[type[Any]] = set()
    left = [] if base is None else [base]
    while left:
        kind = left.pop()
        if kind not in kinds:
            kinds.add(kind)
            left += type.__subclasses__(kind)
    return kinds


class ModelStateTracker:
    """The optimizers and modules of a run, by weak references. Training thread only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._due = -math.inf
        self._search_due = math.inf
        self._failed: str | None = None

    @property
    def reason(self) -> str | None:
        """Why there are no values; None if there are."""
        if self._failed is not None:
            return self._failed
        if not self._optimizers and not self._modules:
            return "no optimizer of torch was seen"
        return None

    def add_optimizer(self, optimizer: Any) -> None:
        """Count the parameters, gradients and state of this optimizer from now on."""
        self._optimizers[id(optimizer)] = optimizer

    def add_model(self, model: Any) -> None:
        """Count the parameters of this torch.nn.Module, also those that no optimizer updates."""
        self._modules.update((id(module), module) for module in model.modules())

    def modules(self) -> list[Any]:
        """Return the known modules that are alive."""
        return list(self._modules.values())

    def search(self) -> None:
        """Enable the search for optimizers and models, for scripts that do not register them."""
        self._search_due = -math.inf

    def is_due(self, now: float) -> bool:
        """Return True if `read` would measure something. Thread-safe."""
        if self._failed is not None:
            return False
        known = self._optimizers or self._modules
        return now >= (self._due if known else self._search_due)

    def find(self) -> float:
        """Search if a search is due, and return its seconds, 0.0 without one. Never raises."""
        began = self._clock()
        if began < self._search_due or self._failed is not None:
            return 0.0
        with self._stops_at_errors():
            optimizers, modules = search()
            self._optimizers.update((id(optimizer), optimizer) for optimizer in optimizers)
            self._modules.update((id(module), module) for module in modules)
        took_s = self._clock() - began
        wait_s = SEARCH_S if self._optimizers else FIRST_SEARCH_S
        self._search_due = began + took_s + max(wait_s, COOLDOWN * took_s)
        return took_s

    def read(self, cuda_index: int | None) -> dict[str, float]:
        """Return the bytes on a device (None: the host) by metric key; {} without parameters.

        Never raises: after an error nothing more is measured, and `reason` returns the error.
        """
        with self._stops_at_errors():
            return self._read(cuda_index)
        return {}

    @contextmanager
    def _stops_at_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the script's classes, which may raise anything
            self._failed = f"{type(error).__name__}: {error}"
            log.warning("stepscope: model states are not measured any more", exc_info=True)

    def _read(self, cuda_index: int | None) -> dict[str, float]:
        began = self._clock()
        optimizers = list(self._optimizers.values())
        weights = StorageBytes(cuda_index)
        weights.add(optimizer_parameters(optimizers))
        updated = {id(parameter) for parameter in optimizer_parameters(optimizers)}
        parameters = module_parameters(list(self._modules.values()))
        others = [one for one in parameters if id(one) not in updated]
        weights.add(others)
        held, state = StorageBytes(cuda_index, weights), StorageBytes(cuda_index, weights)
        held.add(gradients(optimizer_parameters(optimizers)))
        held.add(gradients(one for one in others if one.requires_grad and one.is_leaf))
        state.add(optimizer_state(optimizers))
        ended = self._clock()
        self._due = ended + max(INTERVAL_S, COOLDOWN * (ended - began))
        if not weights.bytes:
            return {}
        return {
            "memory/parameters": float(weights.bytes),
            "memory/gradients": float(held.bytes),
            "memory/optimizer_state": float(state.bytes),
        }
