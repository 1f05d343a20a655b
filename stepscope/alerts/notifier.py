"""Deliver alerts to the user's command and webhook, each in its own thread.

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
from stepscope.alerts.rules import AlertLevel, AlertState
from stepscope.alerts.settings import AlertSettings, Channel, CommandChannel, WebhookChannel
from stepscope.common.formatting import terminal_text

log = logging.getLogger(__name__)

QUEUE_LIMIT = 50  # maximum number of alerts queued for a channel; more are dropped with a warning
EXIT_WAIT_S = 3.0  # timeout for deliveries at the exit of the process
OUTPUT_KEPT = 4096  # bytes kept of the beginning of a command's output
OUTPUT_LIMIT = 2**20  # size of the output at which it is cut to OUTPUT_KEPT
POLL_S = 0.1
PAUSES_S = (1.0, 4.0)  # pauses before the second and third request to the webhook
TEMPORARY_CODES = (408, 425, 429)  # client errors after which the request is repeated


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert, as commands and webhooks receive it; non-finite values are names.

    `device` is the UUID of its GPU, `metric` that of a rule over a metric.
    """

    rule: str
    level: AlertLevel
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


def _encode(alert: Alert) -> bytes:
    # json: a file's name may have a lone surrogate, which msgspec refuses.
    return json.dumps(msgspec.to_builtins(alert)).encode()


def run_command(channel: CommandChannel, alert: Alert) -> str | None:
    """Run the command until it exits or times out; return the problem, or None.

    The command has its own session, so Ctrl-C does not reach it; a timeout kills its children as
    well. Its output goes to an unnamed file: unlike a pipe, the file does not end a command that
    prints after this process has exited.
    """
    name = os.path.expanduser(channel.argv[0])
    variables = {
        f"STEPSCOPE_ALERT_{key.upper()}": "" if value is None else str(value).replace("\0", "")
        for key, value in msgspec.structs.asdict(alert).items()
    }
    with TemporaryFile() as payload, TemporaryFile("a+b") as output:
        payload.write(_encode(alert))
        payload.seek(0)
        try:
            process = subprocess.Popen(
                (name, *channel.argv[1:]),
                stdin=payload,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"{name} cannot be started ({getattr(error, 'strerror', None) or error})"
        deadline = time.monotonic() + channel.timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(POLL_S, left_s))
                break
            if os.fstat(output.fileno()).st_size > OUTPUT_LIMIT:
                os.ftruncate(output.fileno(), OUTPUT_KEPT)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{name} did not end within {channel.timeout_s:g} s and was killed"
        if process.returncode == 0:
            return None
        output.seek(0)
        printed = output.read(OUTPUT_KEPT).decode(errors="replace")
    lines = terminal_text(printed).strip().splitlines()
    return f"{name} ended with exit code {process.returncode}" + "".join(
        f": {line[:300]}" for line in lines[-1:]
    )


def post(channel: WebhookChannel, stopping: threading.Event, alert: Alert) -> str | None:
    """Post the alert as JSON; return the problem without the address, or None.

    Repeats the request if the problem may be temporary and `stopping` is not set. `timeout_s`
    limits the connection and each wait for bytes of the answer.
    """
    problem, is_temporary = _post_once(channel, alert)
    for pause_s in PAUSES_S:
        if is_temporary and not stopping.wait(pause_s):
            problem, is_temporary = _post_once(channel, alert)
    return problem


def _post_once(channel: WebhookChannel, alert: Alert) -> tuple[str | None, bool]:
    """Return the problem and whether it may be temporary."""
    # Imported here: TLS and HTTP take 30 ms, which every script would pay.
    request = import_module("urllib.request")
    opener = request.OpenerDirector()  # without the handler of redirects
    for handler in (request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler):
        opener.add_handler(handler())
    headers = {"Content-Type": "application/json", "User-Agent": f"stepscope/{__version__}"}
    try:
        to_send = request.Request(channel.url, _encode(alert), headers, method="POST")
        with opener.open(to_send, timeout=channel.timeout_s) as response:
            code = response.status
    except Exception as error:  # noqa: BLE001 - of several libraries; their texts may have the URL
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return f"no answer within {channel.timeout_s:.3g} s", True
        return f"no connection ({getattr(reason, 'strerror', None) or type(reason).__name__})", True
    if 300 <= code < 400:
        return f"it redirects (code {code}), which is not followed: use its new address", False
    if code < 300:
        return None, False
    return f"it answered {code}", code >= 500 or code in TEMPORARY_CODES


class AlertNotifier:
    """Delivers the alerts of one run. Thread-safe."""

    def __init__(self, settings: AlertSettings) -> None:
        self._stopping = threading.Event()
        self._threads: list[_ChannelThread] = []
        self._pid = os.getpid()
        self._closed = False
        if (command := settings.command) is not None:
            self._add("the command", command, partial(run_command, command))
        if (webhook := settings.webhook) is not None:
            name = f"the webhook at {webhook.shown}"
            self._add(name, webhook, partial(post, webhook, self._stopping))

    def deliver(self, alert: Alert) -> None:
        """Queue an alert for each channel that accepts it. Never blocks."""
        for thread in self._threads:
            if not self._closed and thread.channel.accepts(alert.level, alert.state):
                thread.put(alert)

    def close(self) -> None:
        """Accept no more alerts. Never blocks."""
        if not self._closed:
            self._closed = True
            for thread in self._threads:
                thread.alerts.put(None)

    def finish(self, timeout_s: float) -> bool:
        """Wait for the deliveries; after `timeout_s` no request is repeated."""
        if self._pid != os.getpid():  # in a forked child, where a lock may be held for ever
            return True
        self.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("stepscope: an alert could not be delivered within %g s", timeout_s)
            self._stopping.set()
            return False
        return True

    def _add(self, name: str, channel: Channel, send: Callable[[Alert], str | None]) -> None:
        thread = _ChannelThread(name, channel, send, self._stopping)
        self._threads.append(thread)
        _open.add(self)
        # The process may be exiting, or have too many threads: see `_ChannelThread.put`.
        with contextlib.suppress(RuntimeError):
            thread.start()


class _ChannelThread(threading.Thread):
    """Deliveries of one channel; `send` returns the problem without secrets, or None."""

    def __init__(
        self,
        what: str,
        channel: Channel,
        send: Callable[[Alert], str | None],
        stopping: threading.Event,
    ) -> None:
        super().__init__(name="stepscope-alerts", daemon=True)
        self.channel = channel
        self.alerts: SimpleQueue[Alert | None] = SimpleQueue()
        self._what = what
        self._send = send
        self._stopping = stopping
        self._warned: set[str] = set()

    def run(self) -> None:
        for alert in iter(self.alerts.get, None):
            if self._stopping.is_set():
                return
            try:
                problem = self._send(alert)
            except Exception as error:  # noqa: BLE001 - the next alert must still be tried
                problem = type(error).__name__
            if problem is None:
                self._warned.discard("delivery")
            else:
                self._warn("delivery", f"{self._what} failed: {problem}")

    def put(self, alert: Alert) -> None:
        """Queue an alert; drop it, with one warning, without a thread or in a full queue."""
        if self.ident is None:
            self._warn("thread", f"no thread can be started for {self._what}; alerts are dropped")
        elif self.alerts.qsize() < QUEUE_LIMIT:
            self.alerts.put(alert)
        else:
            self._warn(
                "queue", f"more than {QUEUE_LIMIT} alerts are queued; later ones are dropped"
            )

    def _warn(self, kind: str, text: str) -> None:
        """Log a failure once, and again only after a success."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("stepscope: alerts: %s", text)


_open: weakref.WeakSet[AlertNotifier] = weakref.WeakSet()


def _finish_all() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for notifier in list(_open):
        notifier.finish(max(0.0, deadline - time.monotonic()))


# Registered at import, so that it runs after the functions that close the runs.
atexit.register(_finish_all)
