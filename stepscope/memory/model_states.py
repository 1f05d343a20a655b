"""Measure the allocated memory at a step boundary: parameters, gradients, optimizer state.

The training thread measures at a boundary where the sampler asks, together with the allocator's
counters: only there the two are consistent. Between boundaries nothing is recorded. Gradients are
those held at that moment: all of them if the boundary is inside `optimizer.step()`, as in a watched
script, and none after `zero_grad()`, as in the built-in loop.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

DEPTH = 4  # Levels of lists and dicts within the state of a parameter that are looked into.
_NO_MEMORY = frozenset({"FakeTensor", "FunctionalTensor", "UninitializedParameter"})


class StorageBytes:
    """Adds up storages on one device: `cuda_index`, or the host's memory for None.

    A storage that is in `other` already is not counted again.
    """

    def __init__(self, cuda_index: int | None, other: StorageBytes | None = None) -> None:
        self.bytes = 0
        self.seen: set[int] = set()
        """Addresses of the storages, as torch's C++ side has them."""
        self._elsewhere: Collection[int] = other.seen if other is not None else ()
        self._index = cuda_index
        self._plain: dict[type[Any], bool] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Add the storages of these tensors; what cannot be asked for its storage adds nothing."""
        seen, elsewhere, index, plain = self.seen, self._elsewhere, self._index, self._plain
        for tensor in tensors:  # some 0.6 us each: a model may have thousands
            is_plain = plain.get(type(tensor))
            if is_plain is None:
                is_plain = plain[type(tensor)] = _is_plain(type(tensor))
            if not is_plain:
                self._add_parts(tensor)
                continue
            try:
                if not (tensor.is_cpu if index is None else tensor.is_cuda):
                    continue
                if index is not None and tensor.get_device() != index:
                    continue
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in seen and key not in elsewhere:
                    seen.add(key)
                    self.bytes += storage.nbytes()
            except (RuntimeError, NotImplementedError, ValueError, AttributeError):
                self._add_sparse(tensor)

    def _add_parts(self, tensor: Any) -> None:
        """Add the tensors that a wrapper consists of."""
        if type(tensor).__name__ in _NO_MEMORY:
            return
        names, _ = tensor.__tensor_flatten__()
        self.add(getattr(tensor, name) for name in names)

    def _add_sparse(self, tensor: Any) -> None:
        """Add the parts of a sparse tensor, which has no storage of its own."""
        layout = str(getattr(tensor, "layout", ""))
        if layout == "torch.sparse_coo":  # the plain names want it coalesced
            self.add((tensor._indices(), tensor._values()))
        elif layout == "torch.sparse_csr":
            self.add((tensor.crow_indices(), tensor.col_indices(), tensor.values()))


def optimizer_parameters(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield what the optimizers update; a parameter of two optimizers comes twice."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def model_parameters(models: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters of each torch.nn.Module and of the modules within; tied ones twice."""
    modules = list(models)
    met = {id(module) for module in modules}
    while modules:
        module = modules.pop()
        yield from (one for one in members(module, "_parameters") if one is not None)
        for child in members(module, "_modules"):
            if child is not None and id(child) not in met:
                met.add(id(child))
                modules.append(child)


def members(module: Any, name: str) -> list[Any]:
    """Return one of a module's own dicts; [] for a module whose constructor has not run."""
    own = vars(module).get(name)
    return list(own.values()) if isinstance(own, dict) else []


def gradients(parameters: Iterable[Any]) -> Iterator[Any]:
    """Yield the gradients that are held now."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            yield gradient


def optimizer_state(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors that the optimizers keep, also those in lists and dicts."""
    for optimizer in optimizers:
        for entry in optimizer.state.values():
            # The common case without a generator: the state of a parameter is a dict of tensors.
            for value in entry.values() if isinstance(entry, Mapping) else (entry,):
                if hasattr(value, "untyped_storage"):
                    yield value
                elif isinstance(value, _CONTAINERS):
                    yield from _tensors_in(value, DEPTH)


_CONTAINERS = (Mapping, list, tuple)


def _tensors_in(values: Any, depth: int) -> Iterator[Any]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if hasattr(value, "untyped_storage"):
            yield value
        elif depth > 1 and isinstance(value, _CONTAINERS):
            yield from _tensors_in(value, depth - 1)


def _is_plain(kind: type[Any]) -> bool:
    return not hasattr(kind, "__tensor_flatten__") and kind.__name__ not in _NO_MEMORY


def search() -> tuple[list[Any], list[Any]]:
    """Return the optimizers, and the models that no other module holds; for the training thread.

    What another thread would hold meanwhile could not be freed by the training. After gc.freeze()
    older objects are not found.
    """
    optimizer_kinds = _with_subclasses("torch.optim.optimizer", "Optimizer")
    module_kinds = _with_subclasses("torch.nn.modules.module", "Module")
    kinds = optimizer_kinds | module_kinds
    if not kinds:
        return [], []
    found = _instances(kinds)
    optimizers = [one for one in found if type(one) in optimizer_kinds and _is_made(one)]
    return optimizers, outermost(one for one in found if type(one) in module_kinds)


def outermost(modules: Iterable[Any]) -> list[Any]:
    """Return the modules that are not in another one."""
    modules = list(modules)
    inner = {
        id(child)
        for module in modules
        for child in members(module, "_modules")
        if child is not module
    }
    return [module for module in modules if id(module) not in inner]


def _instances(kinds: set[type[Any]]) -> list[Any]:
    """Return the tracked objects of exactly these classes.

    `gc.get_objects()` also returns tuples that other threads are still building from generators.
    A thread that comes to extend one while it is referenced here raises SystemError (CPython's
    bpo-15108), so no bytecode may run while they are: the types are collected by one call in C,
    and `gc.get_referrers` returns only what refers to a class, as each instance does.
    """
    types = set(map(type, chain.from_iterable(map(gc.get_objects, [None]))))
    return [one for one in gc.get_referrers(*(kinds & types)) if type(one) in kinds]


def _is_made(optimizer: Any) -> bool:
    """Say whether its constructor has run."""
    own = vars(optimizer)
    return "param_groups" in own and "state" in own


def _with_subclasses(module: str, name: str) -> set[type[Any]]:
    """Return a class of torch and all that derive from it; nothing before it is imported."""
    base = getattr(sys.modules.get(module), name, None)
    if base is None:
        return set()
    kinds, left = {base}, [base]
    while left:
        fresh = set(type.__subclasses__(left.pop())) - kinds
        kinds |= fresh
        left += fresh
    return kinds


log = logging.getLogger(__name__)

EVERY_S = 1.0  # Least time between two readings.
REST = 500
"""Time to the next reading in multiples of what this one took: 0.2 % for each of the parts."""
UNCHANGED_S = 60.0  # Longest time for which a sum that did not change is taken as it was.
SEARCH_S, FIRST_SEARCH_S = 300.0, 2.0
"""Time between two searches for optimizers and models, and while there are none."""


class ModelStateTracker:
    """The optimizers and models of a run, and the bytes they take; for the training thread.

    Both are known by weak references: what the script drops is not kept.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._beside: list[weakref.ref[Any]] = []
        """Parameters of models that no optimizer updates, and that get gradients."""
        self._modes: dict[int, bool] = {}
        """By the id of a model, True if it was in training mode at the last boundary."""
        self._weights = _CachedSum(clock)
        self._state = _CachedSum(clock)
        self._due = -math.inf
        self._search_due = math.inf
        self._index: int | None = None
        self._failed: str | None = None

    @property
    def reason(self) -> str | None:
        """Why there are no values; None where there are."""
        if self._failed is not None:
            return self._failed
        if not self._optimizers and not self._models:
            return "no optimizer of torch was seen"
        return None

    def add_optimizer(self, optimizer: Any) -> None:
        """Count the parameters, gradients and state of this optimizer from now on."""
        self._optimizers[id(optimizer)] = optimizer

    def add_model(self, model: Any) -> None:
        """Count the parameters of this torch.nn.Module, also those that no optimizer updates."""
        self._models[id(model)] = model

    def mode_at_steps(self, model: Any) -> bool | None:
        """Return True if a model was in training mode at the last boundary; None if not known.

        From any thread.
        """
        return self._modes.get(id(model)) if self._models.get(id(model)) is model else None

    def search(self) -> None:
        """Look for optimizers and models by itself: those of a script are not handed over."""
        self._search_due = -math.inf

    def is_due(self, now: float) -> bool:
        """Say whether `read` would do something; from any thread."""
        if self._failed is not None:
            return False
        known = self._optimizers or self._models
        return now >= (self._due if known else self._search_due)

    def find(self) -> float:
        """Search if it is time for it, and return the seconds that took, 0.0 for none.

        Call it at a boundary: the modes of the models are read there, some ten times a second.
        """
        took_s = self._find()
        models = list(self._models.items())
        self._modes = {key: vars(model).get("training") is True for key, model in models}
        return took_s

    def _find(self) -> float:
        began = self._clock()
        if began < self._search_due or self._failed is not None:
            return 0.0
        try:
            found, models = search()
        except Exception:  # of the script's classes, which may raise anything
            log.warning("stepscope: models are not searched for any more", exc_info=True)
            self._search_due = math.inf
            return 0.0
        for optimizer in found:
            self.add_optimizer(optimizer)
        for model in models:
            self.add_model(model)
        took_s = self._clock() - began
        wait_s = SEARCH_S if self._optimizers else FIRST_SEARCH_S
        self._search_due = began + took_s + max(wait_s, REST * took_s)
        return took_s

    def read(self, cuda_index: int | None) -> dict[str, float]:
        """Return the bytes on this device (None: the host) by metric key; {} where none are there.

        Never raises: after an error nothing more is measured, and `reason` says why.
        """
        try:
            return self._read(cuda_index)
        except Exception as error:  # of the script's classes, which may raise anything
            self._failed = f"{type(error).__name__}: {error}"
            log.warning(
                "stepscope: parameters, gradients and optimizer state are not measured any more",
                exc_info=True,
            )
            return {}

    def _read(self, cuda_index: int | None) -> dict[str, float]:
        optimizers, models = list(self._optimizers.values()), list(self._models.values())
        if cuda_index != self._index:
            self._index = cuda_index
            self._weights, self._state = _CachedSum(self._clock), _CachedSum(self._clock)

        weights = self._weights.get(
            _signature(optimizers, models, cuda_index),
            lambda: self._measure_weights(optimizers, models),
        )
        began = self._clock()
        held = StorageBytes(cuda_index, weights)
        held.add(gradients(optimizer_parameters(optimizers)))
        beside = (ref() for ref in self._beside)
        held.add(gradients(one for one in beside if one is not None))
        ended = self._clock()
        self._due = ended + max(EVERY_S, REST * (ended - began))

        def measure_state() -> StorageBytes:
            state = StorageBytes(cuda_index, weights)
            state.add(optimizer_state(optimizers))
            return state

        state = self._state.get(tuple(len(one.state) for one in optimizers), measure_state)
        if not weights.bytes:
            return {}
        return {
            "memory/parameters": float(weights.bytes),
            "memory/gradients": float(held.bytes),
            "memory/optimizer_state": float(state.bytes),
        }

    def _measure_weights(self, optimizers: list[Any], models: list[Any]) -> StorageBytes:
        weights = StorageBytes(self._index)
        weights.add(optimizer_parameters(optimizers))
        updated = {id(parameter) for parameter in optimizer_parameters(optimizers)}
        others = [one for one in model_parameters(models) if id(one) not in updated]
        weights.add(others)
        self._beside = [weakref.ref(one) for one in others if one.requires_grad and one.is_leaf]
        return weights


class _CachedSum:
    """A sum over many tensors that seldom changes.

    It is computed again when its signature changes, and from time to time: half as often after each
    time that it was unchanged.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._signature: Any = None
        self._sum: StorageBytes | None = None
        self._due = -math.inf
        self._wait_s = EVERY_S

    def get(self, signature: Any, measure: Callable[[], StorageBytes]) -> StorageBytes:
        """Return the sum as it is, or as it was when it was taken last."""
        began = self._clock()
        if self._sum is not None and signature == self._signature and began < self._due:
            return self._sum
        fresh = measure()
        ended = self._clock()
        same = self._sum is not None and fresh.bytes == self._sum.bytes
        self._wait_s = min(2 * self._wait_s, UNCHANGED_S) if same else EVERY_S
        self._due = ended + max(self._wait_s, REST * (ended - began))
        self._signature, self._sum = signature, fresh
        return fresh


def _signature(optimizers: list[Any], models: list[Any], cuda_index: int | None) -> tuple[Any, ...]:
    """Return what is likely to differ once the weights do: which they are, and where they lie."""
    parts: list[Any] = [id(model) for model in models]
    for optimizer in optimizers:
        parts.append(id(optimizer))
        for group in optimizer.param_groups:
            weights = group["params"]
            parts.append(len(weights))
            ends = StorageBytes(cuda_index)
            ends.add([weights[0], weights[-1]] if weights else [])
            parts += sorted(ends.seen)
    return tuple(parts)
