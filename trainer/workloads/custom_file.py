"""The custom workload `path.py:build`, given on the command line.

Never set from the dashboard: a visitor must not choose which code runs. An environment variable
passes it to child processes. Does not import torch and does not run the file, as `custom.py` does.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from pathlib import Path

from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer.config import RunConfig, Workload, issue

VARIABLE = "STEPSCOPE_WORKLOAD"
OPTION = "--workload"
START = "stepscope ui --workload path.py:build"


@dataclass(frozen=True, slots=True)
class CustomWorkload:
    """A file and the name of its function that returns the Task."""

    path: Path
    function: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.function}"


def choose(text: str) -> CustomWorkload:
    """Set `path.py:build` for this process and its children. Raises ConfigError."""
    found = _parsed(text)  # does not run the file
    os.environ[VARIABLE] = f"{found.path}:{found.function}"
    return found


def user_workload() -> CustomWorkload | None:
    """Return the custom workload of this process; None without one. Raises ConfigError."""
    text = os.environ.get(VARIABLE)
    return _parsed(text) if text else None


def user_problem(config: RunConfig) -> ConfigIssue | None:
    """Return the issue that prevents a start of the custom workload; None if there is none."""
    if config.workload is not Workload.CUSTOM:
        return None
    try:
        if user_workload() is None:
            reason = "no custom workload was given"
            return issue("workload", reason, f"Start the page with `{START}`")
    except ConfigError as error:
        return error.problem
    return None


def place_in_user_code(error: BaseException, folder: Path) -> str | None:
    """Return the innermost place in the user's folder, as "my.py, line 12, in build", or None."""
    if isinstance(error, SyntaxError) and Path(error.filename or "").parent == folder:
        return f"{Path(error.filename or '').name}, line {error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (file := Path(frame.filename)).parent == folder:
            where = "" if frame.name == "<module>" else f", in {frame.name}"
            return f"{file.name}, line {frame.lineno}{where}"
    return None


def _parsed(text: str) -> CustomWorkload:
    file, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier() or not file.endswith(".py"):
        raise _error(OPTION, f"must be path.py:function, got {text[:200]!r}", f"Write: {START}")
    path = Path(os.path.realpath(file))
    if not path.is_file():
        raise _error(OPTION, f"there is no file {file}", "Check the path")
    return CustomWorkload(path, function)


def _error(place: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(ConfigIssue(place, reason, remedy))
