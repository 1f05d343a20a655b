"""The errors that the driver reported while this machine was looked at (Xids)."""

from __future__ import annotations

from collections import deque

from stepscope.gpu.health import Level, Xid
from stepscope.gpu.xid import XidEvent
from stepscope.gpu.xid_catalog import CHECK_APP, IGNORE, IGNORE_ONCE, RESTART_APP, VENDOR

KEPT = 20
"""Errors of a GPU that are remembered, the newest."""
LEVELS = {
    IGNORE: Level.NOTICE,
    IGNORE_ONCE: Level.NOTICE,
    RESTART_APP: Level.WARNING,
    CHECK_APP: Level.WARNING,
    VENDOR: Level.WARNING,
}
"""How bad an error is by what NVIDIA advises; all other advice is about the GPU or the machine."""


class Xids:
    """The newest errors of every GPU; `add` may be called from any thread."""

    def __init__(self) -> None:
        self._known: dict[str, deque[tuple[float, XidEvent]]] = {}

    def add(self, ts: float, event: XidEvent) -> None:
        """Remember an error that happened at `ts` (epoch seconds)."""
        self._known.setdefault(event.uuid, deque(maxlen=KEPT)).append((ts, event))

    def of(self, uuid: str, ts: float) -> tuple[Xid, ...]:
        """Return those of a GPU with their age at `ts`, oldest first."""
        return tuple(
            Xid(event.code, event.text, event.advice, _level(event), max(0.0, ts - at))
            for at, event in tuple(self._known.get(uuid, ()))
        )


def _level(event: XidEvent) -> Level:
    return LEVELS.get(event.advice, Level.CRITICAL)
