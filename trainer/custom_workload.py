"""The custom workload `path.py:build`, given on the command line.

Never set from the dashboard: a visitor must not choose which code runs. An environment variable
passes it to child processes. This module imports no torch and reads `SETTINGS` without running the
file; `trainer/workloads/custom.py` runs it.
"""

from __future__ import annotations

import ast
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer.config import OPTION_NAME, RunConfig, Workload, issue

VARIABLE = "STEPSCOPE_WORKLOAD"
OPTION = "--workload"
START = "stepscope ui --workload path.py:build"


class UserWorkloadError(ConfigError):
    """An unusable custom workload: its place, reason and remedy."""


@dataclass(frozen=True, slots=True)
class CustomWorkload:
    """A file and the name of its function that returns the Task."""

    path: Path
    function: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.function}"


def choose(text: str) -> CustomWorkload:
    """Set `path.py:build` for this process and its children. Raises UserWorkloadError."""
    found = _parsed(text)  # does not run the file
    os.environ[VARIABLE] = f"{found.path}:{found.function}"
    return found


def user_workload() -> CustomWorkload | None:
    """Return the custom workload of this process; None without one. Raises UserWorkloadError."""
    text = os.environ.get(VARIABLE)
    return _parsed(text) if text else None


def user_workload_settings() -> dict[str, str]:
    """Return names and descriptions in `SETTINGS` of the file. Raises UserWorkloadError."""
    given = user_workload()
    if given is None:
        return {}
    try:
        tree = ast.parse(given.path.read_bytes(), filename=str(given.path))
    except (OSError, ValueError) as error:
        raise _error(given.path.name, f"cannot be read ({error})", "Check the file") from error
    except SyntaxError as error:
        place = f"{given.path.name}, line {error.lineno}"
        raise _error(place, error.msg, "Correct the file and start again") from error
    for node in reversed(tree.body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == "SETTINGS" for one in targets):
                return _settings(f"{given.path.name}, line {node.lineno}", node.value)
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
    except UserWorkloadError as error:
        return error.problem
    unknown = [name for name in config.custom_options.split(",") if name and name not in known]
    if unknown:
        options = ", ".join(known) or "no settings"
        reason = f"the file has no option {unknown[0]}; it has {options}"
        return issue("custom_options", reason, "Switch it off")
    return None


def place_in_user_code(error: BaseException, path: Path | None = None) -> str | None:
    """Return the innermost place in the user's folder, as "my.py, line 12, in build", or None."""
    if path is None:
        try:
            given = user_workload()
        except UserWorkloadError:
            return None
        if given is None:
            return None
        path = given.path
    if isinstance(error, SyntaxError) and Path(error.filename or "").parent == path.parent:
        return f"{Path(error.filename or '').name}, line {error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (file := Path(frame.filename)).parent == path.parent:
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


def _settings(place: str, value: ast.expr | None) -> dict[str, str]:
    try:
        literal = ast.literal_eval(value) if value is not None else None
        found = msgspec.convert(literal, dict[str, str])
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        reason = "SETTINGS must be a literal dict of names and descriptions"
        raise _error(place, reason, 'Write it as {"name": "What it does."}') from error
    for name in found:
        if not re.fullmatch(OPTION_NAME, name):
            reason = f"the setting {name[:60]!r} needs a name of small letters, digits and _"
            raise _error(place, reason, "Give it another name")
    return found


def _error(place: str, reason: str, remedy: str) -> UserWorkloadError:
    return UserWorkloadError(ConfigIssue(place, reason, remedy))
