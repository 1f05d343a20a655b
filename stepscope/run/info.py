"""The run folder's `run.json`: what a run is, its status, and when it last wrote its heartbeat."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stepscope.run.first_cause import RankEnd, first_cause, names
from stepscope.run.folder import RUN_JSON, RunError
from stepscope.run.process import own_start, pid_namespace, process_of, user_name

HEARTBEAT_S = 1.0
STALE_S = 10.0
"""Silence after which a run whose process cannot be looked up counts as crashed."""
GONE = (
    "gone without a word (killed, or the machine went down). "
    "What was recorded is shown; resume from the last checkpoint."
)
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


@dataclass(frozen=True, slots=True, repr=False)
class RunInfo:
    """What `run.json` says, with the status judged now; `run_json` is the whole file."""

    folder: Path
    status: RunStatus
    reason: str | None
    heartbeat_age_s: float
    run_json: dict[str, Any]
    cause: int = 0
    """Number in the folder of the rank that `reason` speaks of."""
    cause_rank: int = 0
    """torch's number of it, which `reason` names."""

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def created(self) -> float:
        """Start of the run in epoch seconds: time 0 of its charts."""
        return float(self.run_json["created"])

    def __repr__(self) -> str:
        return f"RunInfo({self.id!r}, {self.status}, step {self.run_json.get('step', 0)})"


def read_only_reason(run: RunInfo) -> str | None:
    """Say why this process may only look at a run; None for one of its own host and user."""
    host, user = run.run_json.get("host"), run.run_json.get("user", user_name())
    if host != socket.gethostname():
        return f"This run belongs to the host {host}: look only. Its buttons work on a page there."
    if user != user_name():
        return f"This run belongs to the user {user}: look only."
    return None


def read_run(folder: Path) -> RunInfo:
    """Return a run's run_json and its status as of now. Raises RunError for a corrupt file.

    A run of several ranks has ended as the rank that caused its end; it lives as long as rank 0.
    """
    try:
        own = _read_rank(folder / RUN_JSON, 0)
        float(own.run_json["created"])
    except OSError as error:
        raise RunError(f"{folder.name}: cannot read run.json ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder.name}: run.json is not a Stepscope run ({error}). "
            "Delete the folder or restore the file."
        ) from error
    status, reason, cause = own.status, own.run_json.get("reason"), own
    if status is RunStatus.CRASHED:
        reason = f"The training process is {GONE}"
    if not status.live and own.run_json.get("world_size", 1) != 1:
        status, reason, cause = _end_of_all([own, *_other_ranks(folder)], reason)
    return RunInfo(folder, status, reason, own.age_s, own.run_json, cause.number, cause.rank)


def rank_pids(run: RunInfo) -> Iterator[int]:
    """Return the numbers of the live processes of a run that are of this host and user.

    Those of other ranks stand in files of their own, which are read anew.
    """
    several = run.run_json.get("world_size", 1) != 1
    for rank in _other_ranks(run.folder) if several else ():
        theirs = RunInfo(run.folder, rank.status, None, rank.age_s, rank.run_json)
        if rank.status.live and read_only_reason(theirs) is None:
            yield from _pid(rank.run_json)
    if run.status.live and read_only_reason(run) is None:
        yield from _pid(run.run_json)


def _pid(run_json: dict[str, Any]) -> Iterator[int]:
    pid = run_json.get("pid")
    if type(pid) is int:
        yield pid


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's run_json with its status judged now; `beat` is its last sign of life."""

    number: int
    run_json: dict[str, Any]
    status: RunStatus
    beat: float
    age_s: float

    @property
    def rank(self) -> int:
        """torch's number of it: in the folder each machine may count from 0."""
        rank = self.run_json.get("rank")
        return rank if type(rank) is int else self.number

    def end(self) -> RankEnd | None:
        """Return how it ended; None where it lives or has done its work."""
        failure = self.run_json.get("failure")
        if isinstance(failure, dict) and self.status is not RunStatus.STOPPED:
            return self._said(failure.get("ts"), failure.get("reason"))
        if self.status in (RunStatus.FAILED, RunStatus.STOPPED):
            return self._said(self.run_json.get("ended"), self.run_json.get("reason"))
        if self.status is RunStatus.CRASHED:
            return RankEnd(self.number, self.beat, self.beat + STALE_S, None)
        return None

    def _said(self, ts: Any, reason: Any) -> RankEnd:
        when = float(ts) if isinstance(ts, int | float) else self.beat
        return RankEnd(self.number, when, when, str(reason or "It gives no reason."))


def _read_rank(path: Path, number: int) -> _Rank:
    """Read the file of one rank. Raises OSError, ValueError, KeyError, TypeError."""
    run_json = json.loads(path.read_text())
    # A full disk keeps the old text, but the writer still touches the file.
    beat = max(float(run_json["heartbeat"]), path.stat().st_mtime)
    status, age_s = RunStatus(run_json["status"]), max(0.0, time.time() - beat)
    if status.live and not _alive(run_json, age_s):
        status = RunStatus.CRASHED
    return _Rank(number, run_json, status, beat, age_s)


def _other_ranks(folder: Path) -> Iterator[_Rank]:
    for path in folder.glob("rank*.json"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal():
            try:
                yield _read_rank(path, int(number))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # half a folder, or not ours: what the others say counts


def _end_of_all(ranks: list[_Rank], reason: str | None) -> tuple[RunStatus, str | None, _Rank]:
    """Return the status and the sentence of a run of several ranks, and the rank that caused it."""
    ends = [end for end in (rank.end() for rank in ranks) if end is not None]
    causes = first_cause(ends, together_s=HEARTBEAT_S)
    if not causes:
        return ranks[0].status, reason, ranks[0]
    by_number = {rank.number: rank for rank in ranks}
    first = by_number[causes[0].number]
    numbers = sorted(by_number[end.number].rank for end in causes)
    if causes[0].reason is None:
        who = names(numbers, len(ranks))
        return RunStatus.CRASHED, f"{who} {GONE}", first
    if first.status is RunStatus.STOPPED:
        return RunStatus.STOPPED, causes[0].reason, first
    hosts = {str(rank.run_json.get("host")) for rank in ranks}
    where = f" ({first.run_json.get('host')})" if len(hosts) > 1 else ""
    return RunStatus.FAILED, f"Rank {numbers[0]}{where}: {causes[0].reason}", first


def _alive(run_json: dict[str, Any], heartbeat_age_s: float) -> bool:
    if run_json.get("host") != socket.gethostname():
        return heartbeat_age_s < STALE_S
    namespace = run_json.get("pid_namespace")
    if namespace is not None and namespace != pid_namespace():
        return heartbeat_age_s < STALE_S
    if run_json.get("pid") == os.getpid() and run_json.get("pid_started") == own_start():
        return True  # asked at every poll and click; looking into /proc would cost more
    unsure = namespace is None and heartbeat_age_s < FRESH_S
    return process_of(run_json) is not None or unsure
