"""Runs the file of a workload of the user's own, and tells its errors with file and line.

The file is run anew for each run, so that a change takes effect at the next start. Modules beside
it can be imported; a module of the same name that is installed or ours comes first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from stepscope.run.status import shortage
from trainer.custom_workload import place_in_user_code
from trainer.error_messages import RunFailedError


class UserCodeError(RunFailedError):
    """The user's file cannot be used; the message names its line where it has one."""


def load(path: Path) -> ModuleType:
    """Run the file as a module whose classes can be pickled under its name."""
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: no file beside it hides one of ours
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def module_name(path: Path) -> str:
    """Return the name of the user's module, which no other module has."""
    return f"user_workload_{path.stem}"


class UserFile:
    """The user's file, for workers: unpickling it runs the file, which makes its classes known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.path,)


def _loaded(path: Path) -> UserFile:
    if module_name(path) not in sys.modules:
        load(path)
    return UserFile(path)


@contextmanager
def wrap_user_errors(path: Path, what: str) -> Iterator[None]:
    """Raise UserCodeError, with file and line, for whatever the user's code at `path` raises.

    `what` is said where no line of the user's is known. A lack of memory stays what it is: it has
    an explanation of its own.
    """
    try:
        yield
    except RunFailedError:
        raise
    except Exception as error:
        if shortage(error) is not None:
            raise
        place = place_in_user_code(error, path) or f"workload: {what}"
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise UserCodeError(
            f"{place}: {type(error).__name__}: {said}. Correct the file and start again."
        ) from error
