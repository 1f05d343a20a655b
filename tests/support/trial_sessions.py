"""A session of a trial without a store, and the limit that ends it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from stepscope.watch.trial import TrialLimit, TrialPlan
from stepscope.watch.watched_run import WatchedRun


class TrialSession:
    """Keeps what a trial describes; fair because the real session only stores it."""

    def __init__(self, folder: Path, *, rank: int = 0, world_size: int = 1) -> None:
        self.described: dict[str, Any] = {}
        self.is_closed = False
        self.world_size = world_size
        self.recorder = SimpleNamespace(
            folder=folder, run_json={"rank": rank}, step=0, describe=self.described.update
        )

    def close(self, *_: object) -> None:
        self.is_closed = True

    @property
    def run(self) -> WatchedRun:
        return WatchedRun(cast("Any", self))

    @property
    def refused(self) -> str | None:
        """Why the trial was refused, once it has ended."""
        reason: str | None = self.described["trial"]["refused"]
        return reason

    def limit(self, **changes: Any) -> TrialLimit:
        """Limit the run to two steps after one of warm-up, or as changed."""
        values: dict[str, Any] = {"warmup": 1, "steps": 2}
        return TrialLimit(self.run, TrialPlan(**(values | changes)))

    def boundary(self, limit: TrialLimit, step: int = 4) -> None:
        """Reach the boundary after `step`; 4 ends a trial of two steps."""
        self.recorder.step = step
        limit.at_boundary()
