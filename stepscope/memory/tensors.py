"""Bytes of parameters, gradients and optimizer state on one device, each storage counted once.

Everything here asks tensors for what the host knows of them: no CUDA call is made and no device is
waited for. Tied weights share a storage, and a view holds all of its storage. Left out are tensors
on another device, such as an optimizer state that was moved to the host, and tensors without
memory (meta, fake). A tensor of a wrapper class counts by the tensors within: of a DTensor that is
the part on this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

DEPTH = 4
"""Levels of lists and dicts within the state of a parameter that are looked into."""
_NO_MEMORY = frozenset({"FakeTensor", "FunctionalTensor", "UninitializedParameter"})


class Storages:
    """Adds up storages on one device: `cuda_index`, or the host's memory for None.

    A storage that is in `other` already is not counted again.
    """

    def __init__(self, cuda_index: int | None, other: Storages | None = None) -> None:
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
            if isinstance(entry, Mapping):  # of a parameter: the common case, without a generator
                for value in entry.values():
                    if hasattr(value, "untyped_storage"):
                        yield value
                    elif isinstance(value, _CONTAINERS):
                        yield from _tensors_in(value, DEPTH)
            else:
                yield from _tensors_in(entry, DEPTH)


_CONTAINERS = (Mapping, list, tuple)


def _tensors_in(value: Any, depth: int) -> Iterator[Any]:
    if hasattr(value, "untyped_storage"):
        yield value
    elif depth > 0 and isinstance(value, _CONTAINERS):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part, depth - 1)


def _is_plain(kind: type[Any]) -> bool:
    return not hasattr(kind, "__tensor_flatten__") and kind.__name__ not in _NO_MEMORY
