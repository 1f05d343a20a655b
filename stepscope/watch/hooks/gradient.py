"""The gradient norm, where the script clips: what `clip_grad_norm_` returns."""

from __future__ import annotations

from importlib import import_module
from threading import get_ident
from types import ModuleType
from typing import Any

from stepscope.watch.hooks.patches import Function, Guard, Patches, opaque
from stepscope.watch.hooks.state import State, reading

NAME = "clip_grad_norm_"


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
        # A DTensor would have to be gathered.
        value = reading(norm) if type(norm) is self._tensor else None
        self._state.clips.add(value, float(kind), parameters)


def attach(torch: ModuleType, state: State, patches: Patches) -> None:
    """Wrap it under both names by which it is imported."""
    clipping = Clipping(torch, state)
    module = import_module("torch.nn.utils.clip_grad")
    patches.replace(module, NAME, clipping.around, traced=True)
    package = import_module("torch.nn.utils")
    patches.replace(package, NAME, lambda _: getattr(module, NAME), traced=True)
