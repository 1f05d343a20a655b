"""The end of a job whose ranks do not come to a step any more: SIGTERM, then SIGKILL, from outside.

Only processes of this host and user are sent a signal, and only those that certainly write the
run: they have their store open for writing. The launcher is the parent of such a process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from stepscope.distributed.rendezvous import RESTARTS
from stepscope.run import (
    RunInfo,
    RunStatus,
    pid_namespace,
    process_of,
    rank_json,
    read_only_reason,
    write_run_json,
)
from stepscope.run.clocks import now_of
from stepscope.run.process import not_signaled, recorder_of, send_signal
from stepscope.run.rank_info import UNREADABLE, RankFile, find_rank, rank_numbers, read_run_json
from stepscope.store import store_name

log = logging.getLogger(__name__)

TERM_S = 5.0
"""Time between SIGTERM and SIGKILL."""
KILL_S = 2.0
"""Time that the system may need to end a killed process, unless it waits in a driver."""
LAUNCHERS = frozenset(
    {
        "torchrun",
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "trainer.runners.agent",
    }
)
"""Programs and modules that start ranks and end with them."""
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
OTHERS_S = 5.0
"""Time that the other ranks are given to write their end."""
FORCED_REASON = "Ended by force from the page: {}."


def end_job(run: RunInfo) -> str:
    """End all ranks of this host; return a sentence on what came of it. Takes up to 7 s."""
    ranks = dict(rank_processes(run))
    refused = " ".join(_refused(run, ranks))
    if not ranks:
        return f"End now: {refused or 'no rank of this run is a process of this host and user.'}"
    # The launcher first: it would start the ranks again, where it may.
    launchers = {parent.pid: parent for parent in map(_launcher, ranks.values()) if parent}
    processes = [*launchers.values(), *ranks.values()]
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            send_signal(process, signal.SIGTERM)
    _, left = psutil.wait_procs([*ranks.values()], TERM_S)
    for process in [*launchers.values(), *left] if left else []:
        with contextlib.suppress(psutil.Error, OSError):
            send_signal(process, signal.SIGKILL)
    _, stay = psutil.wait_procs(left, KILL_S)
    signals = "SIGTERM" if not left else f"SIGTERM, then SIGKILL to {len(left)} of {len(ranks)}"
    for number in ranks:
        _note(run.folder, number, FORCED_REASON.format(signals))
    if stay:
        still = "it waits" if len(stay) == 1 else "they wait"
        return f"End now: SIGKILL sent; {len(stay)} still there: {still} in a driver or for a disk."
    what = "rank has" if len(ranks) == 1 else "ranks have"
    return " ".join(filter(None, (f"End now: {len(ranks)} {what} ended ({signals}).", refused)))


def keep_stopped(run: RunInfo, environ: Mapping[str, str]) -> None:
    """Once all ranks of this host have ended by Stop, end the launcher that would start them again.

    Called by one of them as its last act; waits OTHERS_S at most for the others.
    """
    left, used = (environ.get(name, "") for name in (MAX_RESTARTS, RESTARTS))
    if not (left.isdecimal() and used.isdecimal() and int(left) > int(used)):
        return
    launcher = _launcher(psutil.Process())
    until = time.monotonic() + OTHERS_S
    while launcher is not None and dict(rank_processes(run)) and time.monotonic() < until:
        time.sleep(0.01)
    if launcher is not None:
        with contextlib.suppress(psutil.Error, OSError):
            send_signal(launcher, signal.SIGTERM)


def rank_processes(run: RunInfo) -> Iterator[tuple[int, psutil.Process]]:
    """Yield number and process of each other rank of this host that certainly writes the run."""
    for rank in _live_ranks(run):
        process = recorder_of(rank.run_json, run.folder / store_name(rank.number))
        if process is not None and process.pid != os.getpid():
            yield rank.number, process


def _refused(run: RunInfo, ranks: Container[int]) -> Iterator[str]:
    """Yield why a process that a rank's file names is not one of `ranks`."""
    for rank in _live_ranks(run):
        process = process_of(rank.run_json)
        if process is not None and process.pid != os.getpid() and rank.number not in ranks:
            yield not_signaled(process, run.folder / store_name(rank.number))


def _live_ranks(run: RunInfo) -> Iterator[RankFile]:
    files = (find_rank(run.folder, number) for number in rank_numbers(run.folder))
    for rank in filter(None, files):
        info = RunInfo(run.folder, rank.status, None, rank.age_s, rank.run_json)
        certain = rank.run_json.get("pid_namespace") == pid_namespace()
        if rank.status.live and certain and read_only_reason(info) is None:
            yield rank


def _launcher(rank: psutil.Process) -> psutil.Process | None:
    """Return the parent of a rank if it is a program that starts ranks, of the same user."""
    with contextlib.suppress(psutil.Error):
        parent = rank.parent()
        if parent is None or parent.uids().real != rank.uids().real:
            return None
        if _program(parent.cmdline()) in LAUNCHERS:
            return parent
    return None


def _program(words: Sequence[str]) -> str:
    """Return what a process runs: the name of its file, or the module after Python's -m.

    Only that: a shell or an editor may name torchrun among its arguments.
    """
    left = iter(words)
    name = Path(next(left, "")).name
    if not name.startswith("python"):
        return name
    for word in left:
        if word == "-m":
            return next(left, "")
        if word in ("-X", "-W"):
            next(left, None)
        elif not word.startswith("-"):
            return Path(word).name
        elif word == "-c":
            return ""
    return ""


def _note(folder: Path, number: int, reason: str) -> None:
    """Write the end of a rank that could not write it itself."""
    try:
        run_json = read_run_json(folder, number)
        if RunStatus(run_json["status"]).live:
            ended = {"status": RunStatus.STOPPED, "reason": reason, "ended": now_of(run_json)}
            write_run_json(folder, run_json | ended, rank_json(number))
    except UNREADABLE as error:
        log.warning(
            "stepscope: %s: the end of rank %d could not be noted: %s", folder, number, error
        )
