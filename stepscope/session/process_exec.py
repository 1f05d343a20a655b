"""End a run whose process becomes another program by `os.exec…`, which runs no exit handler."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from stepscope.common.secrets import without_secrets
from stepscope.run import is_run_id

log = logging.getLogger(__name__)

REPLACED_RUN = "STEPSCOPE_REPLACED_RUN"
"""Environment variable of the new program: the id of the run that ended."""
MAX_TEXT = 200  # characters of the new command in a reason


EndRun = Callable[[str], str | None]
"""Ends the run of this process for a reason; returns the run's id, or None if it has ended."""


def handle_exec(end: EndRun) -> None:
    """Call `end` when this process becomes another program."""
    pid = os.getpid()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.exec" and pid == os.getpid():
            _before_exec(end, *arguments)

    sys.addaudithook(audit)


def take_replaced_run() -> str | None:
    """Return the id of the run whose process became this one; None without one."""
    run_id = os.environ.pop(REPLACED_RUN, "")
    return run_id if is_run_id(run_id) else None


def _before_exec(
    end: EndRun, path: Any, arguments: Any, environment: Mapping[Any, Any] | None
) -> None:
    """End the run, and tell its id to the new program. Raises OSError."""
    try:
        # `os.execvp` tries the folders of PATH one after the other.
        if not os.path.isfile(path) or not os.access(path, os.X_OK):
            return
        named = shlex.join(without_secrets([os.fsdecode(word) for word in arguments]))[:MAX_TEXT]
        run_id = end(f"The script replaced its process by: {named}")
    except Exception as error:  # noqa: BLE001 - the script must still become the program
        log.warning("stepscope: the run could not be closed before os.exec: %s", error)
        return
    if run_id is None:  # closed before, such as in the call below
        return
    if environment is not None:
        os.execve(path, arguments, {**environment, REPLACED_RUN: run_id})
    os.environ[REPLACED_RUN] = run_id
