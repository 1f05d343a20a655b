"""Ranks that a watched script starts by itself are recorded into its run.

Two ways are known: Lightning's own launcher runs the script again, once for each further process;
`torch.multiprocessing.spawn` calls a function in new processes, and the script's own process only
waits. Processes that are forked, as in notebooks, or started by `subprocess` are not recorded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from stepscope.distributed.ranks import Place
from stepscope.run import RunStatus
from stepscope.session.script_session import ScriptSession
from stepscope.session.signal_handlers import handlers_wait
from stepscope.store import store_name
from stepscope.watch.hooks.after_import import AfterImport
from stepscope.watch.watched_run import WatchedRun, begin

log = logging.getLogger(__name__)

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
    AfterImport(SPAWN, lambda module: _follow(module, "start_processes", run, _spawning)).start()
    for name in LAUNCHERS:
        AfterImport(
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
        session.join_job(Place(session.recorder.folder, 0, 0, 0, world_size, started))
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
        place = Place(self.folder, number, number, number, self.count, self.count)
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
