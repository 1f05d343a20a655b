"""Deliver alerts to the user's command and webhook, in a thread for each.

The threads start with the run, because a process that is ending cannot start any. They end after
the run is closed and its alerts are delivered. The training never waits for a delivery; the exit of
the process waits at most EXIT_WAIT_S.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from tempfile import TemporaryFile

import msgspec

from stepscope import __version__
from stepscope.alerts.settings import (
    AlertLevel,
    AlertSettings,
    AlertState,
    Channel,
    CommandChannel,
    WebhookChannel,
)

log = logging.getLogger(__name__)

QUEUE_LIMIT = 50  # maximum number of queued alerts; more are dropped with a warning
EXIT_WAIT_S = 3.0  # timeout for deliveries at the exit of the process
PAUSES_S = (0.0, 1.0, 4.0)  # pauses before the requests to the webhook
TEMPORARY_CODES = (408, 425, 429)  # client errors after which the request is repeated


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert, as commands and webhooks receive it; non-finite values are names."""

    rule: str
    level: AlertLevel
    state: AlertState
    text: str
    value: float | str | None
    metric: str | None  # The metric of a rule over a metric.
    device: str | None  # The UUID of its GPU.
    run: str
    name: str
    folder: str
    host: str
    rank: int
    step: int
    ts: float


def _encode(alert: Alert) -> bytes:
    # json: a file's name may have a lone surrogate, which msgspec refuses.
    return json.dumps(msgspec.to_builtins(alert)).encode()


def run_command(channel: CommandChannel, alert: Alert) -> str | None:
    """Run the command until it exits or times out; return the problem, or None.

    It has its own session: Ctrl-C does not reach it, and a timeout kills its children as well. Its
    output is discarded.
    """
    name = os.path.expanduser(channel.argv[0])
    variables = {
        f"STEPSCOPE_ALERT_{key.upper()}": "" if value is None else str(value).replace("\0", "")
        for key, value in msgspec.structs.asdict(alert).items()
    }
    with TemporaryFile() as payload:
        payload.write(_encode(alert))
        payload.seek(0)
        try:
            process = subprocess.Popen(
                (name, *channel.argv[1:]),
                stdin=payload,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | variables,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"{name} cannot be started ({getattr(error, 'strerror', None) or error})"
    try:
        code = process.wait(channel.timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"{name} did not end within {channel.timeout_s:g} s and was killed"
    return None if code == 0 else f"{name} ended with exit code {code}"


def post(channel: WebhookChannel, alert: Alert) -> str | None:
    """Post the alert as JSON; return the problem without the address, or None.

    Repeats the request if the problem may be temporary. `timeout_s` limits the connection and each
    wait for bytes of the answer.
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
            with opener.open(to_send, timeout=channel.timeout_s) as response:
                code = response.status
        except Exception as error:  # noqa: BLE001 - of several libraries; their texts may have the URL
            reason = getattr(error, "reason", error)
            problem = (
                f"no connection ({getattr(reason, 'strerror', None) or type(reason).__name__})"
            )
            if isinstance(reason, TimeoutError):
                problem = f"no answer within {channel.timeout_s:.3g} s"
            continue
        if code < 300:
            return None
        if code < 400:
            return f"it redirects (code {code}), which is not followed: use its new address"
        problem = f"it answered {code}"
        if code < 500 and code not in TEMPORARY_CODES:
            break
    return problem


class ChannelThread(threading.Thread):
    """Delivers alerts to one channel: a webhook without an answer must not delay a command."""

    def __init__(self, what: str, channel: Channel, send: Callable[[Alert], str | None]) -> None:
        super().__init__(name="stepscope-alerts", daemon=True)
        self.what = what
        self._channel = channel
        self._send = send
        self._alerts: SimpleQueue[Alert | None] = SimpleQueue()
        self._warned: set[str] = set()
        self.owner: AlertNotifier | None = None  # for which the exit waits, until this thread ends

    def put(self, alert: Alert | None) -> None:
        """Queue an alert, or None as the last; drop it, with one warning, if the queue is full."""
        if alert is not None and not self._channel.accepts(alert.level, alert.state):
            return
        if alert is None or self._alerts.qsize() < QUEUE_LIMIT:
            self._alerts.put(alert)
        else:
            self._warn("queue", f"{QUEUE_LIMIT} alerts are queued; later ones are dropped")

    def run(self) -> None:
        """Deliver until None is queued."""
        for alert in iter(self._alerts.get, None):
            try:
                problem = self._send(alert)
            except Exception as error:  # noqa: BLE001 - the next alert must still be tried
                problem = type(error).__name__
            if problem is None:
                self._warned.discard("delivery")
            else:
                self._warn("delivery", f"{self.what} failed: {problem}")

    def _warn(self, kind: str, text: str) -> None:
        """Log a failure once, and again only after a success."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("stepscope: alerts: %s", text)


class AlertNotifier:
    """Delivers the alerts of one run. Thread-safe."""

    def __init__(self, settings: AlertSettings) -> None:
        threads: list[ChannelThread] = []
        if (command := settings.command) is not None:
            send = partial(run_command, command)
            threads.append(ChannelThread("the command", command, send))
        if (webhook := settings.webhook) is not None:
            name = f"the webhook at {webhook.shown}"
            threads.append(ChannelThread(name, webhook, partial(post, webhook)))
        self._threads: list[ChannelThread] = []
        self._pid = os.getpid()
        self._closed = False
        _open.add(self)
        for thread in threads:
            thread.owner = self
            try:
                thread.start()
            except RuntimeError:  # the process is exiting, or has too many threads
                log.warning("stepscope: alerts: no thread can be started for %s", thread.what)
            else:
                self._threads.append(thread)

    def deliver(self, alert: Alert) -> None:
        """Queue an alert. Never blocks."""
        for thread in self._threads:
            if not self._closed:
                thread.put(alert)

    def close(self) -> None:
        """Accept no more alerts. Never blocks."""
        if not self._closed:
            self._closed = True
            for thread in self._threads:
                thread.put(None)

    def finish(self, timeout_s: float) -> bool:
        """Wait for the deliveries; return False if they take longer."""
        if self._pid != os.getpid():  # in a forked child, where a lock may be held for ever
            return True
        self.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("stepscope: an alert could not be delivered within %g s", timeout_s)
            return False
        return True


_open: weakref.WeakSet[AlertNotifier] = weakref.WeakSet()


def _finish_all() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for notifier in list(_open):
        notifier.finish(max(0.0, deadline - time.monotonic()))


# Registered at import, so that it runs after the functions that close the runs.
atexit.register(_finish_all)
