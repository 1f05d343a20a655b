"""End a run whose process becomes another program by `os.exec…`, which runs no exit handler."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepscope.common.secrets import without_secrets
from stepscope.run import is_run_id

log = logging.getLogger(__name__)

REPLACED_RUN = "STEPSCOPE_REPLACED_RUN"
"""Environment variable of the new program: the id of the run that ended."""
MAX_TEXT = 200  # characters of the new command in a reason


@dataclass(frozen=True, slots=True)
class ExecHandler:
    """Ends the run of this process: `end` takes the reason, and returns the run's id or None.

    `command` returns the arguments of the new program, such as those that record it as well.
    """

    end: Callable[[str], str | None]
    command: Callable[[Any, Any], Any] = lambda path, arguments: arguments
    pid: int = field(default_factory=os.getpid)


_handlers: list[ExecHandler] = []  # at most one; an audit hook cannot be removed


def handle_exec(handler: ExecHandler) -> None:
    """Call this handler, in place of an earlier one, when the process becomes another program."""
    if not _handlers:
        sys.addaudithook(_audit)
    _handlers[:] = [handler]


def take_replaced_run() -> str | None:
    """Return the id of the run whose process became this one; None without one."""
    run_id = os.environ.pop(REPLACED_RUN, "")
    return run_id if is_run_id(run_id) else None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.exec" and _handlers[0].pid == os.getpid():
        _before_exec(*arguments)


def _before_exec(
    path: Any, arguments: Sequence[Any], environment: Mapping[Any, Any] | None
) -> None:
    """End the run, then start the new program if its arguments change. Raises OSError."""
    try:
        # `os.execvp` tries the folders of PATH one after the other.
        if not os.path.isfile(path) or not os.access(path, os.X_OK):
            return
        named = shlex.join(without_secrets([os.fsdecode(word) for word in arguments]))[:MAX_TEXT]
        run_id = _handlers[0].end(f"The script replaced its process by: {named}")
        command = _handlers[0].command(path, arguments)
    except Exception as error:  # noqa: BLE001 - the script must still become the program
        log.warning("stepscope: the run could not be closed before os.exec: %s", error)
        return
    if run_id is None:  # closed before, such as in the call below
        return
    if environment is not None:
        os.execve(path, command, {**environment, REPLACED_RUN: run_id})
    os.environ[REPLACED_RUN] = run_id
    if command is not arguments:
        os.execv(path, command)
