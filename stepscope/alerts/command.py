"""Runs the user's command for one alert: the alert as JSON on stdin and in the environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from typing import IO

from stepscope.alerts.channels import Command
from stepscope.common.formatting import terminal_text

OUTPUT_KEPT = 4096
"""Bytes of its output that are kept: the beginning."""
OUTPUT_LIMIT = 2**20
"""Bytes of output in the file from which on it is cut back to its beginning."""
POLL_S = 0.1
PREFIX = "STEPSCOPE_ALERT_"


def run_command(command: Command, alert: str, wait_s: float | None = None) -> str | None:
    """Run it for `alert`, which is JSON; return what went wrong, None for nothing.

    No shell reads its words. It is a session of its own: Ctrl-C in the terminal is not for it, and
    with what it has started it is killed after its time. After `wait_s` it is left to go on.

    Its output goes to a file that has no name: unlike a pipe that has a reader at its other end no
    longer, this one does not end a command that prints after the process that started it.
    """
    with contextlib.ExitStack() as stack:
        try:
            given = stack.enter_context(tempfile.TemporaryFile())
            # Each write of the command goes to the end, also after the file was cut back.
            output = stack.enter_context(tempfile.TemporaryFile("a+b"))
            given.write(alert.encode())
            given.seek(0)
            process = subprocess.Popen(
                command.argv,
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_variables(alert)},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            return f"{command.argv[0]} cannot be started ({why})"
        return _outcome(process, output, command, wait_s)


def _outcome(
    process: subprocess.Popen[bytes], output: IO[bytes], command: Command, wait_s: float | None
) -> str | None:
    """Wait for the end of a command and return what went wrong."""
    name, is_short = command.argv[0], wait_s is not None and wait_s < command.timeout_s
    if not _ended(
        process, output, wait_s if wait_s is not None and is_short else command.timeout_s
    ):
        if is_short:
            return f"{name} did not end within {wait_s:.1f} s, and goes on by itself"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"{name} did not end within {command.timeout_s:g} s and was killed"
    if process.returncode == 0:
        return None
    output.seek(0)
    printed = output.read(OUTPUT_KEPT).decode(errors="replace")
    lines = terminal_text(printed).strip().splitlines()
    said = f": {lines[-1][:300]}" if lines else ""
    return f"{name} ended with exit code {process.returncode}{said}"


def _variables(alert: str) -> dict[str, str]:
    """Return the alert's parts as environment variables, such as STEPSCOPE_ALERT_RULE."""
    parts = json.loads(alert)
    return {
        f"{PREFIX}{name.upper()}": "" if value is None else str(value).replace("\0", "")
        for name, value in parts.items()
    }


def _ended(process: subprocess.Popen[bytes], output: IO[bytes], wait_s: float) -> bool:
    """Wait for a command, `wait_s` at most, and bound what it prints; say whether it has ended."""
    deadline = time.monotonic() + wait_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            process.wait(max(0.0, min(POLL_S, left_s)))
            return True
        except subprocess.TimeoutExpired:
            if os.fstat(output.fileno()).st_size > OUTPUT_LIMIT:
                os.ftruncate(output.fileno(), OUTPUT_KEPT)
            if left_s <= 0:
                return False
