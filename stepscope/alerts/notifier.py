"""Deliver alerts to the user's command and webhook, in one thread per run.

The thread starts with the run, because a process that is ending cannot start any. It ends after the
run is closed and its alerts are delivered. The training never waits for a delivery; the exit of the
process waits at most EXIT_WAIT_S.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from queue import SimpleQueue

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
from stepscope.host.child_process import kill_group

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


class DeliveryError(Exception):
    """An alert could not be delivered; the message has no secret."""


def _encode(alert: Alert) -> bytes:
    # json: a file's name may have a lone surrogate, which msgspec refuses.
    return json.dumps(msgspec.to_builtins(alert)).encode()


def run_command(channel: CommandChannel, alert: Alert) -> None:
    """Run the command until it exits or times out. Raises DeliveryError.

    It has its own session: Ctrl-C does not reach it, and a timeout kills its children as well. Its
    output is discarded.
    """
    name = os.path.expanduser(channel.argv[0])
    variables = {
        f"STEPSCOPE_ALERT_{key.upper()}": "" if value is None else str(value).replace("\0", "")
        for key, value in msgspec.structs.asdict(alert).items()
    }
    try:
        process = subprocess.Popen(
            (name, *channel.argv[1:]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | variables,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeliveryError(f"{name} cannot be started ({reason})") from None
    try:
        process.communicate(_encode(alert), channel.timeout_s)
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        process.wait()
        raise DeliveryError(f"{name} did not end within {channel.timeout_s:g} s") from None
    if process.returncode:
        raise DeliveryError(f"{name} ended with exit code {process.returncode}")


def post(channel: WebhookChannel, alert: Alert) -> None:
    """Post the alert as JSON. Raises DeliveryError without the address.

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
            return
        if code < 400:
            problem = f"it redirects (code {code}), which is not followed: use its new address"
            break
        problem = f"it answered {code}"
        if code < 500 and code not in TEMPORARY_CODES:
            break
    raise DeliveryError(problem)


class AlertNotifier:
    """Delivers the alerts of one run. Thread-safe."""

    def __init__(self, settings: AlertSettings) -> None:
        self._senders: list[tuple[str, Channel, Callable[[Alert], None]]] = []
        command, webhook = settings.command, settings.webhook
        if command is not None:
            self._senders.append(("the command", command, partial(run_command, command)))
        if webhook is not None:
            name = f"the webhook at {webhook.shown}"
            self._senders.append((name, webhook, partial(post, webhook)))
        self._alerts: SimpleQueue[Alert | None] = SimpleQueue()
        self._warned: set[str] = set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="stepscope-alerts", daemon=True)
        self._is_open = False
        if self._senders:
            try:
                self._thread.start()  # it holds this notifier
            except RuntimeError:  # the process is exiting, or has too many threads
                log.warning("stepscope: alerts: no thread can be started, nothing is delivered")
            else:
                self._is_open = True
                _open.add(self)

    def deliver(self, alert: Alert) -> None:
        """Queue an alert, or drop it with one warning if the queue is full. Never blocks."""
        if not self._is_open:
            return
        if self._alerts.qsize() < QUEUE_LIMIT:
            self._alerts.put(alert)
        else:
            self._warn("queue", f"{QUEUE_LIMIT} alerts are queued; later ones are dropped")

    def close(self) -> None:
        """Accept no more alerts. Never blocks."""
        if self._is_open:
            self._is_open = False
            self._alerts.put(None)

    def finish(self, timeout_s: float) -> bool:
        """Wait for the deliveries; return False if they take longer."""
        # In a forked child a lock may be held for ever.
        if self._pid != os.getpid() or self._thread.ident is None:
            return True
        self.close()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("stepscope: an alert could not be delivered within %g s", timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        """Deliver until None is queued."""
        for alert in iter(self._alerts.get, None):
            for name, channel, send in self._senders:
                if not channel.accepts(alert.level, alert.state):
                    continue
                try:
                    send(alert)
                except Exception as error:  # noqa: BLE001 - the next alert must still be tried
                    is_known = isinstance(error, DeliveryError)
                    self._warn(
                        name, f"{name} failed: {error if is_known else type(error).__name__}"
                    )
                else:
                    self._warned.discard(name)

    def _warn(self, subject: str, text: str) -> None:
        """Log a failure once, and again only after a success."""
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning("stepscope: alerts: %s", text)


_open: weakref.WeakSet[AlertNotifier] = weakref.WeakSet()


def _finish_all() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for notifier in list(_open):
        notifier.finish(max(0.0, deadline - time.monotonic()))


# Registered at import, so that it runs after the functions that close the runs.
atexit.register(_finish_all)
