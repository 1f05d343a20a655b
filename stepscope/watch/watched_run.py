"""Record a watched script in one process, and in the processes that it starts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from stepscope import tracker
from stepscope.common.secrets import without_secrets
from stepscope.distributed.rendezvous import (
    RankContext,
    announce,
    find_place,
    say,
)
from stepscope.run import RunKind, RunStatus, runs_root
from stepscope.run.status import RunOutcome, outcome
from stepscope.session.script_session import ScriptSession
from stepscope.session.stop import handlers_wait
from stepscope.settings import parse
from stepscope.store import schema, store_name
from stepscope.watch import hooks
from stepscope.watch.hooks import TorchHooks
from stepscope.watch.hooks.patching import PostImportHook
from stepscope.watch.hooks.settings import SettingHooks
from stepscope.watch.output_log import keep_output
from stepscope.watch.trial import begin_trial

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WatchedRun:
    """The recording of the script, from `begin` to the exit of the process, or none."""

    session: ScriptSession | None
    hooks: TorchHooks | None = None
    words: str = ""  # The settings of the command line, for the processes that the script starts.
    prints: bool = True  # False for all but one rank of a machine.
    outcome: RunOutcome = field(default_factory=RunOutcome)
    given_away: bool = False  # True once the ranks are the processes that the script has started.
    started: int = 1  # Ranks on this host, with those that Lightning has started.
    pid: int = field(default_factory=os.getpid)

    def ended_by(self, error: BaseException) -> None:
        """Record the exception that ended the script, before `close`."""
        if self.given_away:
            return
        self.outcome = outcome(error)
        if self.session is not None:
            self.outcome = self.session.failed(self.outcome, error)

    def close(self) -> None:
        """End the run, with a reason if no step was recorded. Does nothing in a forked child."""
        if self.session is None or self.given_away or os.getpid() != self.pid:
            return
        reason = self.hooks.end() if self.hooks is not None else None
        if reason is not None and self.outcome == RunOutcome():
            self.outcome = replace(self.outcome, reason=reason)
            if self.prints:
                say(f"stepscope: {reason}")
        if self.hooks is not None and self.hooks.applied is not None:
            for entry in self.hooks.applied.end():
                if self.prints:
                    value = "" if entry["value"] is True else f"={entry['value']}"
                    named = f"{entry['name']}{value}"
                    say(f"stepscope: setting {named} {entry['state']}: {entry['text']}")
        self.session.close(self.outcome.status, self.outcome.reason)

    def close_before_exec(self, reason: str) -> str | None:
        """End the run because its process becomes another program; return its id, once."""
        if self.session is None or self.given_away:
            return None
        self.outcome = RunOutcome(reason=reason)
        self.close()
        self.given_away = True
        return self.session.recorder.folder.name


def begin(
    name: str, path: str, runs: Path | None, place: RankContext | None = None, words: str = ""
) -> WatchedRun:
    """Start the recording of the script at `path`; without a session if that fails.

    `runs` is the folder of all runs, if the user has named one. `place` is the rank context of a
    process that another watched process has started. `words` are valid settings.
    """
    is_spawned = place is not None
    try:
        if place is None:
            place = find_place(runs_root(runs), name, os.environ)
        session = ScriptSession(
            place, name=name, kind=RunKind.WATCH, script_folder=Path(path).absolute().parent
        )
        arguments = without_secrets(sys.argv[1:])
        session.recorder.describe(
            script={"path": path, "arguments": arguments, "cwd": str(Path.cwd())}
        )
    except Exception as error:  # noqa: BLE001 - no error of Stepscope may end the script
        say(f"stepscope: not watched: {type(error).__name__}: {error}")
        run = WatchedRun(None)
        begin_trial(run)
        return run
    if not is_spawned:
        announce(place, runs)
    try:
        keep_output(
            session.recorder.folder,
            place.number,
            lambda text: session.recorder.event("output_lost", text),
        )
    except Exception as error:  # noqa: BLE001 - as above
        session.recorder.event("output_lost", f"The script's output is not recorded: {error}")
    run = WatchedRun(session, prints=place.local_rank == 0, words=words)
    trouble = None
    try:
        tracker.attach(session)
        applied = None
        if words:
            recorder = session.recorder
            applied = SettingHooks(parse([words]), lambda found: recorder.describe(settings=found))
        run.hooks = hooks.install(session, applied)
    except Exception as error:  # as above
        log.warning("stepscope: the script's steps will not be recorded", exc_info=True)
        trouble = f"{type(error).__name__}: {error}"
        session.recorder.event("hook_failed", f"The script's steps are not recorded: {error}")
    begin_trial(run, trouble)
    return run


PARENTS_LOG = "output.parent.log"
"""Output of the script's process, if the ranks are the processes that it spawned."""


def follow(run: WatchedRun) -> None:
    """Record the ranks that the script starts by torch or Lightning into the folder of this run."""
    if run.session is None:
        return
    PostImportHook("torch.multiprocessing.spawn", partial(_follow_spawn, run)).start()
    for package in ("lightning.fabric", "lightning_fabric"):
        name = f"{package}.strategies.launchers.subprocess_script"
        PostImportHook(name, partial(_follow_lightning, run)).start()


def _follow_spawn(run: WatchedRun, module: Any) -> None:
    module.start_processes = partial(_start_processes, module.start_processes, run)


def _follow_lightning(run: WatchedRun, module: Any) -> None:
    try:
        module._basic_subprocess_cmd = partial(_rank_command, module._basic_subprocess_cmd, run)
    except AttributeError as error:  # a private name, which another version may not have
        log.warning("stepscope: ranks that Lightning starts are not recorded: %s", error)


def _rank_command(original: Callable[[], Sequence[str]], run: WatchedRun) -> Sequence[str]:
    """Return Lightning's command of a further rank of this host, which is watched."""
    words = list(original())
    session = run.session
    # Of a process of another node the rank is unknown before its start.
    if session is None or os.getpid() != run.pid or os.environ.get("NODE_RANK", "0") != "0":
        return words
    run.started += 1
    try:
        session.join_job(run.started, int(os.environ["WORLD_SIZE"]))
    except Exception as error:  # noqa: BLE001 - the script must still start the rank
        log.warning("stepscope: a rank that Lightning starts is not recorded: %s", error)
        return words
    watch = ["-m", "stepscope.watch", "--rank-of", str(session.recorder.folder)]
    if run.words:
        watch += ["--with", run.words]
    return [words[0], *watch, *words[1:]]


def _start_processes(
    original: Callable[..., Any],
    run: WatchedRun,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    **more: Any,
) -> Any:
    """Start processes of torch; the ranks are the new processes instead of this one."""
    is_idle = run.session and not run.given_away and run.session.recorder.step == 0
    # Without a GPU, scripts that start one process per GPU start none.
    if nprocs and start_method != "fork" and os.getpid() == run.pid and is_idle:
        try:
            fn = _give_away(run, fn, nprocs)
        except Exception as error:  # noqa: BLE001 - the script must still start them
            log.warning("stepscope: spawned processes are not recorded: %s", error)
    return original(fn, args, nprocs, join, daemon, start_method, **more)


def _give_away(run: WatchedRun, fn: Callable[..., Any], count: int) -> SpawnedRank:
    """Stop recording this process, whose folder rank the first new process takes."""
    assert run.session is not None
    recorder = run.session.recorder
    described, folder = recorder.run_json, recorder.folder
    run.given_away = True
    run.session.close(RunStatus.PENDING)  # until the first new process has started
    parents_log = folder / "output.log"
    if parents_log.exists():
        parents_log.replace(folder / PARENTS_LOG)
    name, path = described["name"], described["script"]["path"]
    return SpawnedRank(fn, folder, count, name, path, run.words)


@dataclass(frozen=True, slots=True)
class SpawnedRank:
    """Function of a spawned process, which records the script's function.

    The process exits without atexit handlers, so its run is closed after the function.
    """

    function: Callable[..., Any]
    folder: Path
    count: int
    name: str
    path: str
    words: str

    def __call__(self, number: int, *args: Any) -> Any:
        """Call the script's function with the rank as its first argument, and record it."""
        if number == 0:  # remove the parent's empty store
            schema.delete(self.folder / store_name(0))
        place = RankContext(self.folder, number, number, number, self.count, self.count)
        run = begin(self.name, self.path, None, place, self.words)
        try:
            return self.function(number, *args)
        except BaseException as error:
            with handlers_wait():
                run.ended_by(error)
            raise
        finally:
            with contextlib.suppress(Exception):  # the script's stdout may be None, or closed
                sys.stdout.flush()
            run.close()
