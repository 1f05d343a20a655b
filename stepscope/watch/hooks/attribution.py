"""Attribute losses and clipped gradient norms to optimizers.

A loss is attributed to the optimizers whose gradients its `backward()` changed, until one of them
steps or calls `zero_grad()`. With several optimizers some gradients of each are compared.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from stepscope.memory.model_states import (
    StorageBytes,
    gradients,
    optimizer_parameters,
    optimizer_state,
)

ScalarValue = Any  # A float, or a 0-d CUDA tensor that the recorder reads later, or None.

MAX_SEPARATE = 8  # Maximum number of optimizers with separate losses.

OptimizerKeys = frozenset[int] | None
"""Keys of optimizers; None if unknown, when a loss counts for all of them."""
GradSnapshot = dict[int, list[tuple[Any, Any, int]]]


class LossAttribution:
    """Tracks the live optimizers, and the losses since their last steps.

    An optimizer and its wrapper have the same first parameter, and so the same key.
    """

    def __init__(self) -> None:
        self.made = 0  # Optimizers constructed so far.
        self.has_separate = False  # True if losses are attributed to optimizers.
        self.sums: dict[OptimizerKeys, tuple[ScalarValue, int]] = {}
        """Sum of losses, and its number of `backward()` calls, by optimizers."""
        self.alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The optimizers by `id`."""
        self._made_before: dict[int, int] = {}
        """Number of optimizers made before the last step of each that has stepped, by `id`."""
        self._counted = 0  # Number of live optimizers at the last `_count`.

    def register(self, optimizer: Any) -> None:
        """Add an optimizer at its construction, or, such as a copy, at its first step."""
        if id(optimizer) in self.alive:
            return
        self.made += 1
        self.alive[id(optimizer)] = optimizer
        self._made_before.pop(id(optimizer), None)  # of one that is gone
        self._count()

    def stepped(self, optimizer: Any) -> None:
        """Note a step of this optimizer."""
        self._made_before[id(optimizer)] = self.made

    def earlier_bytes(self, cuda_index: int) -> int:
        """Return the memory of optimizers whose last step was before another one was made.

        Without what they share with the others, such as the parameters of the same model.
        """
        alive = list(self.alive.values())
        made = [self._made_before.get(id(one), self.made) for one in alive]
        newest = [one for one, before in zip(alive, made, strict=True) if before == self.made]
        earlier = [one for one, before in zip(alive, made, strict=True) if before < self.made]
        present = StorageBytes(cuda_index)
        held = StorageBytes(cuda_index, present)
        for total, optimizers in ((present, newest), (held, earlier)):
            total.add(optimizer_parameters(optimizers))
            total.add(gradients(optimizer_parameters(optimizers)))
            total.add(optimizer_state(optimizers))
        return held.bytes

    def gradients(self) -> GradSnapshot:
        """Return some gradients of every optimizer, for `add`."""
        alive = list(self.alive.values())
        now: GradSnapshot = {
            key(one): [(p, p.grad, _version(p.grad)) for p in some_parameters(one)] for one in alive
        }
        if len(alive) < self._counted:
            self._count()
        return now

    def add(self, before: GradSnapshot, value: ScalarValue) -> None:
        """Add a loss whose `backward()` changed some of the gradients in `before`."""
        owners = frozenset(
            party
            for party, parameters in before.items()
            if any(p.grad is not grad or _version(p.grad) != was for p, grad, was in parameters)
        )
        self.put(owners or None, value, 1)

    def put(self, owners: OptimizerKeys, value: ScalarValue, terms: int) -> None:
        """Add a loss to the sum of the same owners."""
        if owners in self.sums:
            total, count = self.sums[owners]
            value, terms = summed(total, value), count + terms
        self.sums[owners] = value, terms

    def take(self, optimizer: Any) -> tuple[ScalarValue, int]:
        """Return and remove the loss of this optimizer and the number of its terms."""
        mine = key(optimizer)
        total, terms = None, 0
        for owners in [owners for owners in self.sums if owners is None or mine in owners]:
            value, count = self.sums.pop(owners)
            total, terms = value if total is None else summed(total, value), terms + count
        return total, terms

    def clear(self, optimizer: Any) -> None:
        """Remove the losses of this optimizer, whose gradients were cleared."""
        mine, before = key(optimizer), self.sums
        self.sums = {}
        for owners, (value, terms) in before.items():
            left = owners - {mine} if owners else None
            if left:
                self.put(left, value, terms)

    def _count(self) -> None:
        self._counted = len(self.alive)
        keys = set()
        for optimizer in self.alive.values():
            keys.add(key(optimizer))
            if len(keys) > MAX_SEPARATE:  # counting all for each new optimizer would be quadratic
                break
        self.has_separate = 1 < len(keys) <= MAX_SEPARATE


def reading(tensor: Any) -> ScalarValue:
    """Return the value of a one-element CPU tensor, or a detached CUDA tensor. Never blocks.

    A CPU value is read immediately because the script may change it in place. Returns None during
    the capture of a CUDA graph, and on any other device.
    """
    if tensor.is_cpu:
        return float(tensor.item())
    if tensor.is_cuda and not sys.modules["torch"].cuda.is_current_stream_capturing():
        return tensor.detach()
    return None


def key(optimizer: Any) -> int:
    """Return the `id` of the optimizer's first parameter."""
    return next(members(optimizer), id(optimizer))


def members(optimizer: Any) -> Iterator[int]:
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def summed(total: ScalarValue, value: ScalarValue) -> ScalarValue:
    """Add two losses; half-precision scalars on a GPU in float32."""
    if type(total) is not float and total.element_size() == 2:
        total = total.float()
    return total + value


def some_parameters(optimizer: Any) -> list[Any]:
    """Return the first, the middle and the last parameters, as most losses use one of them."""
    groups = [group["params"] for group in optimizer.param_groups if group["params"]]
    if not groups:
        return []
    first, last = groups[0], groups[-1]
    return [first[0], first[len(first) // 2], last[len(last) // 2], last[-1]]


def _version(gradient: Any) -> int:
    return -1 if gradient is None else int(gradient._version)


MAX_CALLS = 8  # Maximum number of calls of `clip_grad_norm_` kept before a step.

ClipGradCall = tuple[ScalarValue, frozenset[int]]
"""The returned norm, and the `id`s of the parameters, to hold no reference to them."""


class ClipGradCalls:
    """The newest calls of `clip_grad_norm_` since the last step, of different parameters."""

    def __init__(self) -> None:
        self.calls: list[ClipGradCall] = []

    def add(self, norm: ScalarValue, parameters: list[Any]) -> None:
        """Add a call; it replaces earlier ones of the same parameters."""
        now = frozenset(map(id, parameters))
        others = [call for call in self.calls if now.isdisjoint(call[1])]
        self.calls = [*others, (norm, now)][-MAX_CALLS:]

    def take(self, optimizer: Any, attribution: LossAttribution) -> ScalarValue:
        """Return and remove the norm of this optimizer's step.

        Returns None without a call, and if its parameters were clipped in parts.
        """
        taken = self.calls
        self.calls = []
        if attribution.has_separate:
            mine = set(members(optimizer))
            self.calls = [call for call in taken if mine.isdisjoint(call[1])]
            taken = [call for call in taken if not mine.isdisjoint(call[1])]
        return taken[0][0] if len(taken) == 1 else None
