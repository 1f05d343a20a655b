"""Deliver alerts to the user's command and webhook, each in a thread of its own.

A thread starts with the run, because a process that is ending can start none, and ends once the run
is closed and its alerts are delivered. The training never waits for it; the process waits at most
EXIT_WAIT_S at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import IO, Any

from stepscope.alerts.channels import ChannelFilter, CommandChannel
from stepscope.alerts.config import AlertSettings
from stepscope.alerts.rules import AlertState, Severity
from stepscope.common.formatting import terminal_text

OUTPUT_KEPT = 4096
"""Bytes of its output that are kept: the beginning."""
OUTPUT_LIMIT = 2**20
"""Bytes of output in the file from which on it is cut back to its beginning."""
POLL_S = 0.1
PREFIX = "STEPSCOPE_ALERT_"


def run_command(command: CommandChannel, alert: str, wait_s: float | None = None) -> str | None:
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
    process: subprocess.Popen[bytes],
    output: IO[bytes],
    command: CommandChannel,
    wait_s: float | None,
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


log = logging.getLogger(__name__)

QUEUE_LIMIT = 50
"""Alerts that wait at most for each way; what comes beyond is left out, and the log says so."""
EXIT_WAIT_S = 3.0
"""How long the end of the process waits for what is still to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert as commands and webhooks get it; `value` has NaN and infinities as their names.

    `device` is the UUID of the GPU that it is about, `metric` that of a rule over a metric.
    """

    rule: str
    level: Severity
    state: AlertState
    text: str
    value: float | str | None
    metric: str | None
    device: str | None
    run: str
    name: str
    folder: str
    host: str
    rank: int
    step: int
    ts: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


SendAlert = Callable[[str, float | None], str | None]
"""Tells of an alert, given as JSON; returns what went wrong, in words without secrets.

The number is how many seconds it may wait in all, None for its own time.
"""


class AlertNotifier:
    """Tells of the alerts of one run; `deliver` and `close` may be called by any thread."""

    def __init__(self, settings: AlertSettings) -> None:
        self._stopping = threading.Event()
        self._ways: list[_Way] = []
        command, webhook = settings.command, settings.webhook
        if command is not None:
            tell = partial(run_command, command)
            self._ways.append(_Way("the command", command, tell, self._stopping))
        if webhook is not None:
            what = f"the webhook at {webhook.shown}"
            # Imported only here: TLS and HTTP take 30 ms, which every script would pay.
            post = import_module("stepscope.alerts.webhook").post
            tell = partial(post, webhook, self._stopping)
            self._ways.append(_Way(what, webhook, tell, self._stopping))
        self._pid = os.getpid()
        if self._ways:
            _open.add(self)

    def deliver(self, alert: Alert) -> None:
        """Have an alert told; returns at once, unless the process is ending and has no thread."""
        deadline = time.monotonic() + EXIT_WAIT_S
        for way in self._ways:
            if way.wants.alert(alert.level, alert.state):
                way.deliver(json.dumps(alert.to_json()), deadline)

    def close(self) -> None:
        """No more alerts come; returns at once."""
        for way in self._ways:
            way.close()

    def finish(self, timeout_s: float) -> bool:
        """Wait for what is still to be told; after that time give up what waits for a retry."""
        if self._pid != os.getpid():  # in a forked child, where the lock may be held for ever
            return True
        self.close()
        deadline = time.monotonic() + timeout_s
        done = [way.finished(max(0.0, deadline - time.monotonic())) for way in self._ways]
        if not all(done):
            log.warning("stepscope: an alert could not be told within %g s", timeout_s)
            self._stopping.set()
        return all(done)


class _Way:
    """One way to tell, with its thread and what waits for it."""

    def __init__(
        self, what: str, wants: ChannelFilter, tell: SendAlert, stopping: threading.Event
    ) -> None:
        self.wants = wants
        self._what = what
        self._tell = tell
        self._stopping = stopping
        self._waiting: deque[str] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failed: set[str] = set()
        self._thread: threading.Thread | None = None
        thread = threading.Thread(target=self._work, name="stepscope-alerts", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # the process is ending, or has too many threads
            log.info("stepscope: alerts: no thread for %s: %s", what, error)

    def deliver(self, alert: str, deadline: float) -> None:
        """Have an alert told, without a thread by the caller until `deadline`."""
        with self._changed:
            if self._closed:
                return
            if self._thread is not None:
                self._queue(alert)
                return
        left_s = deadline - time.monotonic()
        if left_s > 0:
            self._told(alert, left_s)

    def close(self) -> None:
        """No more alerts come."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def finished(self, timeout_s: float) -> bool:
        """Wait for the thread; say whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _queue(self, alert: str) -> None:
        if len(self._waiting) >= QUEUE_LIMIT:
            self._say_once("queue", f"more than {QUEUE_LIMIT} alerts wait; later ones are left out")
            return
        self._waiting.append(alert)
        self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting or self._stopping.is_set():
                    return
                alert = self._waiting.popleft()
            self._told(alert, None)

    def _told(self, alert: str, wait_s: float | None) -> None:
        try:
            problem = self._tell(alert, wait_s)
        except Exception as error:  # noqa: BLE001 - the next one must still be tried
            problem = type(error).__name__
        if problem is None:
            self._failed.discard("way")
        else:
            self._say_once("way", f"{self._what} failed: {problem}")

    def _say_once(self, what: str, text: str) -> None:
        """Log a failure, and the next one only after a success."""
        if what not in self._failed:
            self._failed.add(what)
            log.warning("stepscope: alerts: %s", text)


_open: weakref.WeakSet[AlertNotifier] = weakref.WeakSet()


def _finish_all() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for actions in list(_open):
        actions.finish(max(0.0, deadline - time.monotonic()))


# First of all, so that it runs after what closes the runs.
atexit.register(_finish_all)
