"""Run a script or module as the `__main__` of this process, like `python script.py`."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn


class ScriptNotFoundError(Exception):
    """The script was not found; message and exit code are those of python."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def split_options(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options before a script; return them, and the script with its arguments.

    Ends the process with a usage error without a script.
    """
    known = parser._option_string_actions
    ours = 0
    while ours < len(argv) and argv[ours].startswith("-"):
        word = argv[ours]
        has_value = word in known and known[word].nargs is None
        ours += 2 if has_value else 1
        if word in ("-m", "--"):
            break
    options = parser.parse_args([word for word in argv[:ours] if word != "--"])
    if ours >= len(argv):
        parser.error("no script given: name a file, or a module after -m.")
    return options, list(argv[ours:])


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


def exit_without_handlers(code: int) -> NoReturn:
    """End the process without handlers of the script, which may save or upload."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the script
            stream.flush()
    os._exit(code)


def from_file(path: str, arguments: Sequence[str]) -> Script:
    """Load a script; set `sys.argv` and `sys.path`. Raises ScriptNotFoundError, SyntaxError."""
    absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # as python does
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
    find: Any = runpy._get_module_details  # type: ignore[attr-defined]
    _, spec, code = find(name, ScriptNotFoundError)
    sys.argv[0] = path = str(spec.origin)
    main_globals = _main_globals(spec.parent, spec.loader, spec, path, spec.cached)
    return Script(name, path, code, main_globals)


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
