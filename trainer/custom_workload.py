"""The custom workload `path.py:build`, given on the command line.

Never set from the dashboard: a visitor must not choose which code runs. An environment variable
passes it to child processes. This module imports no torch and reads `SETTINGS` without running the
file; `trainer/workloads/custom.py` runs it.
"""

from __future__ import annotations

import ast
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer.config import OPTION_NAME, RunConfig, Workload, issue

VARIABLE = "STEPSCOPE_WORKLOAD"
OPTION = "--workload"
START = "stepscope ui --workload path.py:build"
_OptionName = Annotated[str, msgspec.Meta(pattern=rf"^{OPTION_NAME}\Z")]


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


def user_workload_settings() -> dict[str, str]:
    """Return names and descriptions in `SETTINGS` of the file. Raises ConfigError."""
    given = user_workload()
    if given is None:
        return {}
    name = given.path.name
    try:
        tree = ast.parse(given.path.read_bytes(), filename=name)
    except (OSError, ValueError, SyntaxError) as error:
        raise _error(name, f"cannot be read: {error}", "Correct the file") from error
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name("SETTINGS")], value=value)
                | ast.AnnAssign(target=ast.Name("SETTINGS"), value=ast.expr() as value)
            ):
                return _settings(f"{name}, line {node.lineno}", value)
    return {}


def user_problem(config: RunConfig) -> ConfigIssue | None:
    """Return the issue that prevents a start of the custom workload; None if there is none."""
    if config.workload is not Workload.CUSTOM:
        return None
    try:
        if user_workload() is None:
            reason = "no custom workload was given"
            return issue("workload", reason, f"Start the page with `{START}`")
        known = user_workload_settings()
    except ConfigError as error:
        return error.problem
    unknown = [name for name in config.custom_options.split(",") if name and name not in known]
    if unknown:
        options = ", ".join(known) or "no settings"
        reason = f"the file has no option {unknown[0]}; it has {options}"
        return issue("custom_options", reason, "Switch it off")
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


def _settings(place: str, value: ast.expr) -> dict[str, str]:
    try:
        found = msgspec.convert(ast.literal_eval(value), dict[_OptionName, str])
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        reason = "SETTINGS must be a literal dict; names have small letters, digits and _"
        raise _error(place, reason, 'Write it as {"name": "What it does."}') from error
    return found


def _error(place: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(ConfigIssue(place, reason, remedy))
