"""Deliver alerts to the user's command and webhook, in one thread of the process.

The thread starts with the first run, because a process that is ending cannot start any. The
training never waits for a delivery; the exit of the process waits at most EXIT_WAIT_S.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import threading
import time
from importlib import import_module
from queue import SimpleQueue

import msgspec

from stepscope import __version__
from stepscope.alerts.settings import (
    AlertLevel,
    AlertSettings,
    AlertState,
    CommandChannel,
    WebhookChannel,
)
from stepscope.host.child_process import kill_group

log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 10.0
WEBHOOK_TIMEOUT_S = 5.0  # for the connection, and for each wait for bytes of the answer
EXIT_WAIT_S = 3.0  # timeout for deliveries at the exit of the process
PAUSES_S = (0.0, 1.0, 4.0)  # pauses before the requests to the webhook


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert, as commands and webhooks receive it; non-finite values are names."""

    rule: str
    level: AlertLevel
    state: AlertState
    text: str
    value: float | str | None = None
    metric: str | None = None  # The metric of a rule over a metric.
    device: str | None = None  # The UUID of its GPU.
    run: str
    name: str
    folder: str
    host: str
    rank: int
    step: int
    ts: float


class AlertSender:
    """Delivers alerts one after the other in its thread. Thread-safe."""

    def __init__(self) -> None:
        self._alerts: SimpleQueue[tuple[Alert, AlertSettings] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="stepscope-alerts", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False after `finish`, and in a forked child."""
        return self._thread.is_alive()

    def deliver(self, alert: Alert, settings: AlertSettings) -> None:
        """Queue an alert. Never blocks."""
        self._alerts.put((alert, settings))

    def finish(self, timeout_s: float) -> None:
        """Deliver what is queued, and end; log a warning if that takes longer."""
        self._alerts.put(None)
        self._thread.join(timeout_s)
        if self.is_alive:
            log.warning("stepscope: an alert could not be delivered within %g s", timeout_s)

    def _work(self) -> None:
        for alert, settings in iter(self._alerts.get, None):
            if settings.command is not None and settings.command.accepts(alert.level, alert.state):
                self._log_failure(settings.command.argv[0], run_command(settings.command, alert))
            if settings.webhook is not None and settings.webhook.accepts(alert.level, alert.state):
                self._log_failure(settings.webhook.shown, post(settings.webhook, alert))

    def _log_failure(self, target: str, problem: str | None) -> None:
        if problem is not None:
            log.warning("stepscope: alerts: %s failed: %s", target, problem)


def run_command(channel: CommandChannel, alert: Alert) -> str | None:
    """Run the command until it exits or times out; return why it failed, or None.

    It has its own session: Ctrl-C does not reach it, and a timeout kills its children as well. Its
    output is discarded.
    """
    variables = {
        f"STEPSCOPE_ALERT_{key.upper()}": "" if value is None else str(value).replace("\0", "")
        for key, value in msgspec.structs.asdict(alert).items()
    }
    try:
        process = subprocess.Popen(
            (os.path.expanduser(channel.argv[0]), *channel.argv[1:]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | variables,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"it cannot be started ({error})"
    try:
        process.communicate(_encode(alert), COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        process.wait()
        return f"it did not end within {COMMAND_TIMEOUT_S:g} s"
    return f"exit code {process.returncode}" if process.returncode else None


def post(channel: WebhookChannel, alert: Alert) -> str | None:
    """Post the alert as JSON; return why it failed, without the address, or None.

    Repeats the request without an answer, and after an error of the server.
    """
    # Imported here: TLS and HTTP take 30 ms, which every script would pay.
    request = import_module("urllib.request")
    opener = request.OpenerDirector()  # without the handler of redirects
    for handler in (request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler):
        opener.add_handler(handler())
    headers = {"Content-Type": "application/json", "User-Agent": f"stepscope/{__version__}"}
    problem = ""
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        try:
            to_send = request.Request(channel.url, _encode(alert), headers, method="POST")
            with opener.open(to_send, timeout=WEBHOOK_TIMEOUT_S) as response:
                code = response.status
        except Exception as error:  # noqa: BLE001 - of several libraries; their texts may have the URL
            reason = getattr(error, "reason", error)
            problem = f"no answer ({getattr(reason, 'strerror', None) or type(reason).__name__})"
            continue
        if code < 300:
            return None
        problem = f"it answered {code}"  # also to a redirect, which is not followed
        if code < 500:
            break
    return problem


def _encode(alert: Alert) -> bytes:
    # json: a file's name may have a lone surrogate, which msgspec refuses.
    return json.dumps(msgspec.to_builtins(alert)).encode()


_sender: AlertSender | None = None


def open_sender() -> AlertSender:
    """Return the sender of this process; a forked child has its own."""
    global _sender
    if _sender is None or not _sender.is_alive:
        _sender = AlertSender()
    return _sender


def _finish() -> None:
    if _sender is not None and _sender.is_alive:
        _sender.finish(EXIT_WAIT_S)


# Registered at import, so that it runs after the functions that close the runs.
atexit.register(_finish)
