"""The thread that tells others of alerts: the user's command and the webhook of alerts.toml.

It is started by the first alert that somebody wants to hear of, and ends with the run and what is
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

from stepscope.alerts.command import run_command
from stepscope.alerts.config import Settings
from stepscope.alerts.rules import Level, State
from stepscope.alerts.ways import Wants

log = logging.getLogger(__name__)

QUEUE_LIMIT = 50
"""Alerts that wait at most; what comes beyond is left out, and the log says so."""
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


Deliver = Callable[[str], str | None]
"""Tells of an alert, given as JSON; returns what went wrong, in words without secrets."""


class Actions:
    """Tells of the alerts of one run; `deliver` and `close` may be called by any thread."""

    def __init__(self, settings: Settings) -> None:
        self._stopping = threading.Event()
        self._ways: list[tuple[str, Wants, Deliver]] = []
        command, webhook = settings.command, settings.webhook
        if command is not None:
            self._ways.append(("the command", command, partial(run_command, command)))
        if webhook is not None:
            what = f"the webhook at {webhook.shown}"
            # Imported only here: TLS and HTTP take 30 ms, which every script would pay.
            post = import_module("stepscope.alerts.webhook").post
            self._ways.append((what, webhook, partial(post, webhook, self._stopping)))
        self._waiting: deque[Alert] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failed: set[str] = set()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        if self._ways:
            _open.add(self)

    def deliver(self, alert: Alert) -> None:
        """Have an alert told; returns at once."""
        if self._closed or not any(
            wants.alert(alert.level, alert.state) for _, wants, _ in self._ways
        ):
            return
        with self._changed:
            if len(self._waiting) >= QUEUE_LIMIT:
                self._say_once(
                    "queue", f"more than {QUEUE_LIMIT} alerts wait; later ones are left out"
                )
                return
            self._waiting.append(alert)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="stepscope-alerts", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """No more alerts come; returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def finish(self, timeout_s: float) -> bool:
        """Wait for what is still to be told; after that time give up what waits for a retry."""
        if self._pid != os.getpid():  # in a forked child, where the lock may be held for ever
            return True
        self.close()
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("stepscope: an alert could not be told within %g s", timeout_s)
            self._stopping.set()
        return not thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting or self._stopping.is_set():
                    return
                alert = self._waiting.popleft()
            self._tell(alert)

    def _tell(self, alert: Alert) -> None:
        text = json.dumps(alert.to_json())
        for what, wants, deliver in self._ways:
            if not wants.alert(alert.level, alert.state):
                continue
            try:
                problem = deliver(text)
            except Exception as error:  # noqa: BLE001 - the other way must still be tried
                problem = type(error).__name__
            if problem is None:
                self._failed.discard(what)
            else:
                self._say_once(what, f"{what} failed: {problem}")

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
