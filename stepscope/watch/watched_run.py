"""The run of a watched script in one process: made before the script, closed after it."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepscope import tracker
from stepscope.distributed.ranks import Place, RankError, announce, find_place, say
from stepscope.run import RunKind, RunStatus, runs_root
from stepscope.run.outcome import Outcome, outcome
from stepscope.session.script_session import ScriptSession
from stepscope.store import StoreError
from stepscope.watch import hooks
from stepscope.watch.hooks import Hooks
from stepscope.watch.output_log import keep_output

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WatchedRun:
    """What is recorded of the script, if anything could be; it ends with the process."""

    session: ScriptSession | None
    hooks: Hooks | None = None
    tells: bool = True
    """Of several ranks of a machine one talks on the terminal."""
    outcome: Outcome = field(default_factory=Outcome)
    given_away: bool = False
    """True once the processes that the script has started record in its place."""
    pid: int = field(default_factory=os.getpid)

    def ended_by(self, error: BaseException) -> None:
        """Keep what ended the script; `close` has still to be called."""
        if self.given_away:
            return
        self.outcome = outcome(error)
        if self.session is not None:
            self.outcome = self.session.failed(self.outcome, error)

    def close(self) -> None:
        """End the run; one of which nothing could be recorded says why. Not in a forked child."""
        if self.session is None or self.given_away or os.getpid() != self.pid:
            return
        nothing = self.hooks.end() if self.hooks is not None else None
        if nothing is not None and self.outcome.status is RunStatus.FINISHED:
            self.outcome = replace(self.outcome, reason=nothing)
            if self.tells:
                say(f"stepscope: {nothing}")
        self.session.close(self.outcome.status, self.outcome.reason)


def begin(name: str, path: str, runs: Path | None, place: Place | None = None) -> WatchedRun:
    """Make the run of the script at `path`; where that fails the script runs unwatched.

    `runs` is the folder of all runs, where the user has named it. `place` is known to a process
    that another watched one has started.
    """
    joins = place is not None
    try:
        if place is None:
            place = find_place(runs_root(runs), name, os.environ)
        session = ScriptSession(place, name=name, kind=RunKind.WATCH)
        session.recorder.describe(
            script={"path": path, "arguments": sys.argv[1:], "cwd": str(Path.cwd())}
        )
    except (OSError, StoreError, RankError) as error:
        say(f"stepscope: not watched, no run folder could be made: {error}")
        return WatchedRun(None)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with us, the script has to run
        say(f"stepscope: not watched: {type(error).__name__}: {error}")
        return WatchedRun(None)
    if not joins:
        announce(place, runs)
    try:
        keep_output(
            session.recorder.folder,
            place.number,
            lambda text: session.recorder.event("output_lost", text),
        )
    except Exception as error:  # noqa: BLE001 - as above
        session.recorder.event("output_lost", f"What the script prints is not kept: {error}")
    run = WatchedRun(session, tells=place.local_rank == 0)
    try:
        tracker.attach(session)
        run.hooks = hooks.install(session)
    except Exception as error:  # as above
        log.warning("stepscope: the script's steps will not be recorded", exc_info=True)
        session.recorder.event("hook_failed", f"Nothing of the script's steps is recorded: {error}")
    return run
