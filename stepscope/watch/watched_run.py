"""The run of a watched script in one process, and in the processes that it starts."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from stepscope import tracker
from stepscope.distributed.rendezvous import (
    RankContext,
    RankEnvironmentError,
    announce,
    find_place,
    say,
)
from stepscope.run import RunKind, RunStatus, runs_root
from stepscope.run.status import RunOutcome, outcome
from stepscope.session.script_session import ScriptSession
from stepscope.session.stop import handlers_wait
from stepscope.store import StoreError, store_name
from stepscope.watch import hooks
from stepscope.watch.hooks import TorchHooks
from stepscope.watch.hooks.patching import PostImportHook
from stepscope.watch.output_log import keep_output

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WatchedRun:
    """What is recorded of the script, if anything could be; it ends with the process."""

    session: ScriptSession | None
    hooks: TorchHooks | None = None
    tells: bool = True  # Of several ranks of a machine one talks on the terminal.
    outcome: RunOutcome = field(default_factory=RunOutcome)
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


def begin(name: str, path: str, runs: Path | None, place: RankContext | None = None) -> WatchedRun:
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
    except (OSError, StoreError, RankEnvironmentError) as error:
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


SPAWN = "torch.multiprocessing.spawn"
LAUNCHERS = tuple(
    f"{package}.strategies.launchers.subprocess_script"
    for package in ("lightning.fabric", "lightning_fabric")
)
PARENTS_LOG = "output.parent.log"
"""What the script's own process prints, where the processes that it spawned are the ranks."""


def follow(run: WatchedRun) -> None:
    """Have the ranks that the script of this run starts recorded into its folder."""
    if run.session is None:
        return
    PostImportHook(SPAWN, lambda module: _follow(module, "start_processes", run, _spawning)).start()
    for name in LAUNCHERS:
        PostImportHook(
            name, lambda module: _follow(module, "_basic_subprocess_cmd", run, _rerunning)
        ).start()


def _follow(
    module: ModuleType, name: str, run: WatchedRun, make: Callable[..., Callable[..., Any]]
) -> None:
    original = getattr(module, name, None)
    if original is None:
        log.warning("stepscope: %s has no %s: its processes are not recorded", module, name)
    else:
        setattr(module, name, make(original, run))


def _rerunning(command: Callable[[], Sequence[str]], run: WatchedRun) -> Callable[..., Any]:
    """Wrap Lightning's function that returns the command of a further process of this machine."""

    started = 1  # this process is the first of its machine

    def watched() -> Sequence[str]:
        nonlocal started
        words = list(command())
        session = run.session
        # The number of a process of another node cannot be told before it has started.
        if session is None or os.getpid() != run.pid or os.environ.get("NODE_RANK", "0") != "0":
            return words
        started += 1
        try:
            _join(session, started)
        except Exception as error:  # noqa: BLE001 - the script has to start it all the same
            log.warning("stepscope: a rank that Lightning starts is not recorded: %s", error)
            return words
        join = ["-m", "stepscope.watch", "--rank-of", str(session.recorder.folder)]
        return [words[0], *join, *words[1:]]

    return watched


def _join(session: ScriptSession, started: int) -> None:
    """Make this process rank 0 of its job, once all `started` processes of it are known."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if started == world_size:  # all of them run on this machine
        session.join_job(RankContext(session.recorder.folder, 0, 0, 0, world_size, started))
    else:
        session.recorder.describe(rank=0, local_rank=0, world_size=world_size)


def _spawning(start: Callable[..., Any], run: WatchedRun) -> Callable[..., Any]:
    """Wrap `start_processes`: in place of this process, those that it starts are the ranks."""

    def watched(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
        **more: Any,
    ) -> Any:
        if start_method != "fork" and os.getpid() == run.pid and _is_idle(run):
            try:
                fn = _give_away(run, fn, nprocs)
            except Exception as error:  # noqa: BLE001 - the script has to start them all the same
                log.warning("stepscope: spawned processes are not recorded: %s", error)
        return start(fn, args, nprocs, join, daemon, start_method, **more)

    return watched


def _is_idle(run: WatchedRun) -> bool:
    """Say whether this process has trained nothing itself, and its run is still its own."""
    return run.session is not None and not run.given_away and run.session.recorder.step == 0


def _give_away(run: WatchedRun, fn: Callable[..., Any], count: int) -> SpawnedRank:
    """Stop recording this process; its number in the folder is that of the first one it starts."""
    assert run.session is not None
    recorder = run.session.recorder
    described, folder = recorder.described(), recorder.folder
    run.given_away = True
    run.session.close(RunStatus.PENDING)  # as which it stays until the first one has started
    parents_log = folder / "output.log"
    if parents_log.exists():
        parents_log.replace(folder / PARENTS_LOG)
    return SpawnedRank(fn, folder, count, described["name"], described["script"]["path"])


@dataclass(frozen=True, slots=True)
class SpawnedRank:
    """What a spawned process runs in place of the script's function, which gets its number first.

    Such a process ends without its atexit handlers: its run is closed with the function.
    """

    function: Callable[..., Any]
    folder: Path
    count: int
    name: str
    path: str

    def __call__(self, number: int, *args: Any) -> Any:
        """Call the function, recorded."""
        if number == 0:  # the parent's own, in which is nothing
            for ending in ("", "-wal", "-shm"):
                (self.folder / f"{store_name(0)}{ending}").unlink(missing_ok=True)
        place = RankContext(self.folder, number, number, number, self.count, self.count)
        run = begin(self.name, self.path, None, place)
        try:
            return self.function(number, *args)
        except BaseException as error:
            with handlers_wait():
                run.ended_by(error)
            raise
        finally:
            sys.stdout.flush()
            run.close()
