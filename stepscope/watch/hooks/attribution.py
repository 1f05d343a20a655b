"""Which of several optimizers a loss belongs to.

A loss belongs to the optimizers whose gradients its `backward()` changed, until one of them steps
or clears its gradients by `zero_grad()`. To see whether they changed, a few parameters of each
optimizer are compared before and after. With one optimizer nothing of this is done.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

Reading = Any
"""A float, or a 0-d CUDA tensor that the recorder reads later, or None."""

LIMIT = 8
"""More optimizers at a time, such as one a parameter, are not told apart."""

Owners = frozenset[int] | None
"""Keys of optimizers; None where it is not known: then the loss counts for all of them."""
Grads = dict[int, list[tuple[Any, Any, int]]]


class Parties:
    """The optimizers that are alive, and the losses that wait for their steps.

    An optimizer and the one that it wraps have the same first parameter, and so one key.
    """

    def __init__(self) -> None:
        self.made = 0
        """Optimizers constructed so far."""
        self.are_several = False
        self.sums: dict[Owners, tuple[Reading, int]] = {}
        """Losses, and how many calls of `backward()` each is the sum of."""
        self._alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """By their identities."""
        self._counted = 0
        """How many were alive when their keys were counted."""

    def meet(self, optimizer: Any) -> None:
        """Note an optimizer that was constructed, or that steps: a copied one is only seen then."""
        if id(optimizer) in self._alive:
            return
        self.made += 1
        self._alive[id(optimizer)] = optimizer
        self._count()

    def gradients(self) -> Grads:
        """Return some gradients of every optimizer as they are now, for `add`."""
        now: Grads = {}
        alive = list(self._alive.values())
        for optimizer in alive:
            now[key(optimizer)] = [
                (parameter, parameter.grad, _version(parameter.grad))
                for parameter in _some_parameters(optimizer)
            ]
        if len(alive) < self._counted:
            self._count()
        return now

    def add(self, before: Grads, value: Reading) -> None:
        """Keep a loss whose `backward()` found the gradients as they were before."""
        owners = frozenset(
            party
            for party, parameters in before.items()
            if any(p.grad is not grad or _version(p.grad) != was for p, grad, was in parameters)
        )
        self.put(owners or None, value, 1)

    def put(self, owners: Owners, value: Reading, terms: int) -> None:
        """Add a loss to those of the same owners."""
        if owners in self.sums:
            total, count = self.sums[owners]
            value, terms = summed(total, value), count + terms
        self.sums[owners] = value, terms

    def take(self, optimizer: Any) -> tuple[Reading, int]:
        """Return, and forget, the loss of this optimizer and the number of its terms."""
        mine, total, terms = key(optimizer), None, 0
        for owners in [owners for owners in self.sums if owners is None or mine in owners]:
            value, count = self.sums.pop(owners)
            total, terms = value if total is None else summed(total, value), terms + count
        return total, terms

    def clear(self, optimizer: Any) -> None:
        """Forget the losses of this optimizer alone: its gradients were cleared."""
        mine, before, self.sums = key(optimizer), self.sums, {}
        for owners, (value, terms) in before.items():
            left = owners - {mine} if owners else None
            if left:
                self.put(left, value, terms)

    def _count(self) -> None:
        self._counted, keys = len(self._alive), set()
        for optimizer in self._alive.values():
            keys.add(key(optimizer))
            if len(keys) > LIMIT:  # to look at all for each new one would be quadratic
                break
        self.are_several = 1 < len(keys) <= LIMIT


def reading(tensor: Any) -> Reading:
    """Return the value of a one-element tensor if it is on the CPU, else itself, detached.

    Nothing waits. A CPU value is read at once because the script may change it in place; a CUDA
    tensor inside a graph's capture, or on any other device, is None.
    """
    if tensor.is_cpu:
        return float(tensor.item())
    if tensor.is_cuda and not sys.modules["torch"].cuda.is_current_stream_capturing():
        return tensor.detach()
    return None


def key(optimizer: Any) -> int:
    """Return the identity of its first parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return id(parameter)
    return id(optimizer)


def members(optimizer: Any) -> set[int]:
    """Return the identities of all its parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def summed(total: Reading, value: Reading) -> Reading:
    """Add two losses; half-precision scalars on a GPU in float32."""
    if type(total) is not float and total.element_size() == 2:
        total = total.float()
    return total + value


def _some_parameters(optimizer: Any) -> list[Any]:
    """Return the first, the middle and the last: a loss rarely reaches none of them."""
    groups = [group["params"] for group in optimizer.param_groups if group["params"]]
    if not groups:
        return []
    first, last = groups[0], groups[-1]
    return [first[0], first[len(first) // 2], last[len(last) // 2], last[-1]]


def _version(gradient: Any) -> int:
    return -1 if gradient is None else int(gradient._version)
