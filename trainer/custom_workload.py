"""A workload of the user's own, `path.py:build`, given when the program is started.

Never from the page: whoever can open the page must not choose which code runs. The choice is kept
in the environment, so that child processes know it too. This module does not import torch and does
not run the file: `SETTINGS` is read from its text. `trainer/workloads/custom.py` runs it.
"""

from __future__ import annotations

import ast
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigIssue, RunConfig, Workload

VARIABLE = "STEPSCOPE_WORKLOAD"
OPTION = "--workload"
START = "streamlit run app.py -- --workload path.py:build"
MAX_SETTINGS = 32
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


class UserWorkloadError(ValueError):
    """A workload of the user's own that cannot be used; one sentence with a remedy."""


@dataclass(frozen=True, slots=True)
class CustomWorkload:
    """A file and the name of the function in it that makes the task."""

    path: Path
    function: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.function}"


def choose(text: str) -> CustomWorkload:
    """Take `path.py:build` as this process's and its children's own workload.

    Raises UserWorkloadError for what cannot be such a file; the file is not run.
    """
    found = _parsed(text)
    os.environ[VARIABLE] = f"{found.path}:{found.function}"
    return found


def user_workload() -> CustomWorkload | None:
    """Return the workload that was given at start-up; None without one.

    Raises UserWorkloadError if its file is gone.
    """
    text = os.environ.get(VARIABLE)
    return _parsed(text) if text else None


def user_workload_settings() -> dict[str, str]:
    """Return the settings that the file declares in `SETTINGS`: names and what each does.

    Empty without a workload or without settings. Raises UserWorkloadError for a file that cannot be
    read and for settings that are no `dict[str, str]` of literals.
    """
    given = user_workload()
    if given is None:
        return {}
    try:
        tree = ast.parse(given.path.read_bytes(), filename=str(given.path))
    except (OSError, ValueError) as error:
        raise _error(given.path.name, f"cannot be read ({error})", "Look at the file") from error
    except SyntaxError as error:
        place = f"{given.path.name}, line {error.lineno}"
        raise _error(place, error.msg, "Correct the file and start again") from error
    node = next((node for node in reversed(tree.body) if _is_settings(node)), None)
    return {} if node is None else _settings(given, node)


def user_problem(config: RunConfig) -> ConfigIssue | None:
    """Return why the user's own workload cannot start with this configuration; reads its file."""
    if config.workload is not Workload.CUSTOM:
        return None
    try:
        if user_workload() is None:
            return ConfigIssue(
                "workload", "no custom workload was given", f"Start the page with `{START}`"
            )
        known = user_workload_settings()
    except UserWorkloadError as error:
        field, _, text = str(error).partition(": ")
        reason, _, remedy = text.rstrip(".").rpartition(". ")
        return ConfigIssue(field, reason, remedy)
    unknown = [name for name in config.custom_options.split(",") if name and name not in known]
    if unknown:
        options = ", ".join(known) or "no settings"
        reason = f"the file has no option {unknown[0]}; it has {options}"
        return ConfigIssue("custom_options", reason, "Switch it off")
    return None


def place_in_user_code(error: BaseException, path: Path | None = None) -> str | None:
    """Return "my.py, line 12, in build": where in the user's code an exception came from.

    That is the innermost frame of a file in the folder of the user's file, which is `path` or the
    one that was given at start-up.
    """
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
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).parent == path.parent
    ]
    if not frames:
        return None
    where = "" if frames[-1].name == "<module>" else f", in {frames[-1].name}"
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}{where}"


def _parsed(text: str) -> CustomWorkload:
    file, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier() or not file.endswith(".py"):
        raise _error(OPTION, f"must be path.py:function, got {text[:200]!r}", f"Write: {START}")
    path = Path(os.path.realpath(file))
    if not path.is_file():
        raise _error(OPTION, f"there is no file {file}", "Look at the path")
    return CustomWorkload(path, function)


def _is_settings(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(target, ast.Name) and target.id == "SETTINGS" for target in targets)


def _settings(given: CustomWorkload, node: ast.stmt) -> dict[str, str]:
    place = f"{given.path.name}, line {node.lineno}"
    assert isinstance(node, (ast.Assign, ast.AnnAssign))
    try:
        found = ast.literal_eval(node.value) if node.value is not None else None
    except (ValueError, TypeError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(part, str) for pair in found.items() for part in pair
    ):
        raise _error(
            place,
            "SETTINGS must be a literal dict of names and descriptions",
            'Write it as {"name": "What it does."}',
        )
    if len(found) > MAX_SETTINGS:
        raise _error(
            place, f"SETTINGS has {len(found)} names, {MAX_SETTINGS} are allowed", "Remove some"
        )
    wrong = next((name for name in found if not _NAME.fullmatch(name)), None)
    if wrong is not None:
        raise _error(
            place,
            f"the setting {wrong[:60]!r} needs a name of small letters, digits and _",
            "Give it another name",
        )
    return found


def _error(place: str, reason: str, remedy: str) -> UserWorkloadError:
    return UserWorkloadError(f"{place}: {reason}. {remedy}.")
