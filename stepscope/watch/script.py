"""Run a script or module as the `__main__` of this process, like `python script.py`."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any


class ScriptNotFoundError(Exception):
    """The script was not found; message and exit code are those of python."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(f"{sys.executable}: {message}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Script:
    """Compiled code of a script; `path` is absolute."""

    name: str
    path: str
    code: CodeType
    main_globals: dict[str, Any]

    def run(self) -> None:
        """Run the code in a new `__main__`. Raises the script's exceptions."""
        module = ModuleType("__main__")
        module.__dict__.update(self.main_globals)
        sys.modules["__main__"] = module
        exec(self.code, module.__dict__)


def from_file(path: str, arguments: Sequence[str]) -> Script:
    """Load a script; set `sys.argv` and `sys.path`. Raises ScriptNotFoundError, SyntaxError."""
    absolute = os.path.abspath(path)
    sys.argv = [path, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(absolute)))
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        text = f"can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}"
        raise ScriptNotFoundError(text, 2) from error
    # Without dont_inherit the script would inherit this file's __future__ imports.
    code = compile(source, absolute, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", absolute)
    name = os.path.splitext(os.path.basename(absolute))[0]
    return Script(name, absolute, code, _main_globals(None, loader, None, absolute, None))


def from_module(name: str, arguments: Sequence[str]) -> Script:
    """Load a module by its name, like `python -m`; set `sys.argv` and `sys.path`.

    Raises ScriptNotFoundError, and the exceptions of importing its packages.
    """
    _set_first_path(os.getcwd())
    sys.argv = ["-m", *arguments]
    spec, code = _find(name)
    sys.argv[0] = path = str(spec.origin)
    main_globals = _main_globals(spec.parent, spec.loader, spec, path, spec.cached)
    return Script(name, path, code, main_globals)


def _find(name: str) -> tuple[ModuleSpec, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        text = f"Error while finding module specification for {name!r} ({type(error).__name__}: "
        raise ScriptNotFoundError(f"{text}{error})", 1) from error
    if spec is None:
        raise ScriptNotFoundError(f"No module named {name}", 1)
    if spec.submodule_search_locations is not None:
        try:
            return _find(f"{name}.__main__")
        except ScriptNotFoundError as error:
            text = f"No module named {name}.__main__; {name!r} is a package and cannot be directly"
            raise ScriptNotFoundError(f"{text} executed", 1) from error
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if code is None:
        raise ScriptNotFoundError(f"No code object available for {name}", 1)
    return spec, code


def _set_first_path(folder: str) -> None:
    """Replace the first entry of `sys.path`, which python omits with -P and PYTHONSAFEPATH."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _main_globals(
    package: str | None, loader: Any, spec: ModuleSpec | None, path: str, cached: str | None
) -> dict[str, Any]:
    """Return the globals of python's `__main__`, in the same order."""
    entries: dict[str, Any] = {"__package__": package, "__loader__": loader, "__spec__": spec}
    if sys.version_info < (3, 14):
        entries["__annotations__"] = {}
    return {**entries, "__builtins__": builtins, "__file__": path, "__cached__": cached}
