"""The states of a run, and how often it shows that it lives."""

from __future__ import annotations

from enum import StrEnum

HEARTBEAT_S = 1.0
STALE_S = 10.0
"""Silence after which a run whose process cannot be looked up counts as crashed."""
FRESH_S = 3 * HEARTBEAT_S
"""A heartbeat this young counts more than a process not found under its number.

The number may be that of another container."""


class RunStatus(StrEnum):
    """States of a run: stopped by the user, failed by an error, crashed without saying why."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    CRASHED = "crashed"

    @property
    def live(self) -> bool:
        """True while the run may still write."""
        return self in (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.PAUSED)


class RunKind(StrEnum):
    """Who writes a run: it decides what its page shows and which buttons it answers."""

    TRAINER = "trainer"
    """The built-in workloads."""
    WATCH = "watch"
    """A script under `stepscope watch`."""
    INIT = "init"
    """A script that calls `stepscope.init`."""
    RECORD = "record"
    """`stepscope record`: no training, the machine only."""
