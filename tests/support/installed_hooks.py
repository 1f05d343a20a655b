"""The hooks of `stepscope watch` in the process of the tests; torch is restored at the end.

Imports torch only when used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

from stepscope.watch import hooks
from stepscope.watch.hooks import TorchHooks, patching
from stepscope.watch.hooks.settings import SettingHooks


@contextmanager
def torch_restored() -> Iterator[None]:
    """Undo at the end what the hooks replace and register."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patching, "setattr", patch.setattr, raising=False)
        import_module("torch.jit._builtins")._get_builtin_table()
        for module, name in (
            ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
            ("torch.nn.modules.module", "_global_forward_pre_hooks"),
            ("torch.jit._builtins", "_builtin_table"),
        ):
            owner = import_module(module)
            patch.setattr(owner, name, getattr(owner, name).copy())
        yield


@contextmanager
def installed(session: Any, applied: SettingHooks | None = None) -> Iterator[TorchHooks]:
    """Install the hooks until the end of the block."""
    with torch_restored():
        found = hooks.install(session, applied)
        try:
            yield found
        finally:
            found.leave()
            hooks._installed.remove(found)
