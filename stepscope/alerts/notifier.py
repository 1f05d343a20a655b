"""The threads that tell others of alerts: the user's command and the webhook of alerts.toml.

Each has a thread of its own, so that a server that does not answer delays no command. It is started
with the run, because a process that is ending can start none, and ends with the run and what is
still to be told. The training never waits for it; the process does at its end, EXIT_WAIT_S at most.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

from stepscope.alerts.channels import Wants
from stepscope.alerts.command import run_command
from stepscope.alerts.config import Settings
from stepscope.alerts.rules import Level, State

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
    level: Level
    state: State
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


Deliver = Callable[[str, float | None], str | None]
"""Tells of an alert, given as JSON; returns what went wrong, in words without secrets.

The number is how many seconds it may wait in all, None for its own time.
"""


class Actions:
    """Tells of the alerts of one run; `deliver` and `close` may be called by any thread."""

    def __init__(self, settings: Settings) -> None:
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

    def __init__(self, what: str, wants: Wants, tell: Deliver, stopping: threading.Event) -> None:
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


_open: weakref.WeakSet[Actions] = weakref.WeakSet()


def _finish_all() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for actions in list(_open):
        actions.finish(max(0.0, deadline - time.monotonic()))


# First of all, so that it runs after what closes the runs.
atexit.register(_finish_all)
