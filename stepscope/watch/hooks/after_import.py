"""Runs a function once, as soon as a module has been imported by somebody else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

log = logging.getLogger(__name__)


class AfterImport(MetaPathFinder):
    """Stands first in `sys.meta_path` until the module `name` has been executed.

    The real finders find the module; only its loader's `exec_module` is wrapped, on the instance,
    so that `module.__loader__`, `inspect` and `importlib.resources` see what they always saw.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def start(self) -> None:
        """Wait for the import; where it has been, run the function now."""
        module = sys.modules.get(self._name)
        if module is not None:
            self._then(module)
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ask the other finders, and wrap what they found."""
        if fullname != self._name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self._name:
                self.stop()
                self._then(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            log.warning(
                "stepscope: %s is loaded in a way that cannot be watched; "
                "no training metrics will be recorded",
                self._name,
            )
