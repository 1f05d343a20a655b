"""The gradient norm, where the script clips: what `clip_grad_norm_` returns."""

from __future__ import annotations

from importlib import import_module
from threading import get_ident
from types import ModuleType
from typing import Any

from stepscope.hooks.patches import Function, Guard, Patches
from stepscope.hooks.state import State, reading

NAME = "clip_grad_norm_"


def attach(torch: ModuleType, state: State, patches: Patches) -> None:
    """Wrap it under both names by which it is imported."""
    guard = Guard("train/grad_norm")
    is_compiling, tensor = torch.compiler.is_compiling, torch.Tensor

    def around_clipping(original: Function) -> Function:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            if not is_compiling() and get_ident() == state.thread and guard.works:
                try:
                    # The last call before the step counts. A DTensor would have to be gathered.
                    state.grad_norm = reading(norm) if type(norm) is tensor else None
                except Exception as error:  # noqa: BLE001 - a metric is never worth a training run
                    guard.failed(error)
            return norm

        return clip_grad_norm_

    module = import_module("torch.nn.utils.clip_grad")
    patches.replace(module, NAME, around_clipping, traced=True)
    package = import_module("torch.nn.utils")
    patches.replace(package, NAME, lambda _: getattr(module, NAME), traced=True)
