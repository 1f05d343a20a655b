"""Runs the user's command for one alert: the alert as JSON on stdin and in the environment."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time

from stepscope.alerts.ways import Command
from stepscope.formatting import terminal_text

OUTPUT_KEPT = 4096
"""Bytes of its output that are kept; the rest is read and thrown away."""
POLL_S = 0.1
PREFIX = "STEPSCOPE_ALERT_"


def run_command(command: Command, alert: str) -> str | None:
    """Run it for `alert`, which is JSON; return what went wrong, None for nothing.

    No shell reads its words. It is a session of its own: Ctrl-C in the terminal is not for it, and
    with what it has started it is killed after its time.
    """
    try:
        with tempfile.TemporaryFile() as given:
            given.write(alert.encode())
            given.seek(0)
            process = subprocess.Popen(
                command.argv,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_variables(alert)},
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        return f"{command.argv[0]} cannot be started ({getattr(error, 'strerror', None) or error})"
    with process:
        output = _output(process, time.monotonic() + command.timeout_s)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{command.argv[0]} did not end within {command.timeout_s:g} s and was killed"
    if process.returncode == 0:
        return None
    lines = terminal_text(output.decode(errors="replace")).strip().splitlines()
    said = f": {lines[-1][:300]}" if lines else ""
    return f"{command.argv[0]} ended with exit code {process.returncode}{said}"


def _variables(alert: str) -> dict[str, str]:
    """Return the alert's parts as environment variables, such as STEPSCOPE_ALERT_RULE."""
    parts = json.loads(alert)
    return {
        f"{PREFIX}{name.upper()}": "" if value is None else str(value).replace("\0", "")
        for name, value in parts.items()
    }


def _output(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Read what it prints until it ends or its time is over; return the beginning."""
    pipe, kept = process.stdout, b""
    assert pipe is not None
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        is_open = True
        while time.monotonic() < deadline:
            if is_open and selector.select(POLL_S):
                chunk = os.read(pipe.fileno(), 65536)
                kept = (kept + chunk)[:OUTPUT_KEPT]
                if not chunk:
                    is_open = False
                    selector.unregister(pipe)
            elif process.poll() is not None:
                break  # what it has started may keep the pipe open
            elif not is_open:
                time.sleep(POLL_S)
    return kept
