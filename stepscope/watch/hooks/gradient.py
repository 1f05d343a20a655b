"""The gradient norm, where the script clips: what `clip_grad_norm_` returns.

Several calls before a step, one a module, are parts of one norm. A call for parameters that were
clipped before replaces the earlier call. Parts of different kinds have no common norm: None.
"""

from __future__ import annotations

import math
from importlib import import_module
from threading import get_ident
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope.watch.hooks.attribution import Parties, Reading, members, reading
from stepscope.watch.hooks.patching import Function, Guard, Patches, opaque

if TYPE_CHECKING:
    from stepscope.watch.hooks.state import State

NAME = "clip_grad_norm_"
MAX_CALLS = 1024
"""Calls before a step that are remembered."""

Call = tuple[Reading, float, frozenset[int]]
"""The norm that was returned, its type, and the identities of the parameters. The parameters
themselves would be kept alive where no step follows."""


class Clips:
    """The calls of `clip_grad_norm_` since the last step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._seen: set[int] = set()
        """Identities of their parameters, from the second call on."""

    def add(self, norm: Reading, kind: float, parameters: list[Any]) -> None:
        """Remember a call."""
        now = frozenset(map(id, parameters))
        if self.calls:
            self._seen = self._seen or set(self.calls[0][2])
            if not now.isdisjoint(self._seen):
                self._keep([call for call in self.calls if now.isdisjoint(call[2])])
            self._seen |= now
        self.calls.append((norm, kind, now))
        del self.calls[:-MAX_CALLS]

    def take(self, optimizer: Any, parties: Parties) -> Reading:
        """Return the total norm of what was clipped for this optimizer's step.

        A script that steps by hand has no optimizer: None.
        """
        taken, self.calls, self._seen = self.calls, [], set()
        if parties.are_several:
            mine = members(optimizer)
            self._keep([call for call in taken if mine.isdisjoint(call[2])])
            taken = [call for call in taken if not mine.isdisjoint(call[2])]
        if len(taken) < 2:
            return taken[0][0] if taken else None
        return _total([call[0] for call in taken], {call[1] for call in taken})

    def _keep(self, calls: list[Call]) -> None:
        self.calls = calls
        self._seen = set().union(*(call[2] for call in calls))


class Clipping:
    """Listens to `clip_grad_norm_`."""

    def __init__(self, torch: ModuleType, state: State) -> None:
        self._state = state
        self._tensor: type[Any] = torch.Tensor
        self._is_compiling = torch.compiler.is_compiling
        opaque(self._add, with_callees=True)
        opaque(self._listed, with_callees=True)

    def around(self, original: Function) -> Function:
        """Wrap the function."""
        state, is_compiling, guard = self._state, self._is_compiling, Guard("train/grad_norm")

        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != state.thread or not guard.works:
                return original(parameters, *args, **kwargs)
            listed = self._listed(parameters)
            # A generator can be read only once; torch warns of an empty one.
            norm = original(listed or parameters, *args, **kwargs)
            kind = args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)
            if listed:
                guard.call(self._add, norm, kind, listed)
            return norm

        return clip_grad_norm_

    def _listed(self, parameters: Any) -> list[Any]:
        return [parameters] if isinstance(parameters, self._tensor) else list(parameters)

    def _add(self, norm: Any, kind: Any, parameters: list[Any]) -> None:
        # A DTensor would have to be gathered from all ranks.
        value = reading(norm) if type(norm) is self._tensor else None
        self._state.clips.add(value, float(kind), parameters)


def attach(torch: ModuleType, state: State, patches: Patches) -> None:
    """Wrap it under both names by which it is imported."""
    clipping = Clipping(torch, state)
    module = import_module("torch.nn.utils.clip_grad")
    patches.replace(module, NAME, clipping.around, traced=True)
    package = import_module("torch.nn.utils")
    patches.replace(package, NAME, lambda _: getattr(module, NAME), traced=True)


def _total(norms: list[Reading], kinds: set[float]) -> Reading:
    """Return the p-norm of p-norms, which is the p-norm of all; None for norms of several kinds."""
    kind = kinds.pop()
    if kinds or kind <= 0 or any(norm is None for norm in norms):
        return None
    tensors = [norm for norm in norms if type(norm) is not float]
    if not tensors:
        return max(norms) if kind == math.inf else sum(norm**kind for norm in norms) ** (1 / kind)
    torch = import_module("torch")
    first = tensors[0].float()
    # Nothing here waits for a GPU: a number is filled in by a kernel, not copied.
    same = [
        first.new_full((), norm) if type(norm) is float else norm.to(first, non_blocking=True)
        for norm in norms
    ]
    return torch.linalg.vector_norm(torch.stack(same), kind)
