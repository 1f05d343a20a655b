"""Read `run.json`: what a run is, its status, its last heartbeat, why it hung."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.common.files import is_own_folder, read_regular_file
from stepscope.common.formatting import format_short_time
from stepscope.run.fatal_signal import fatal_signal
from stepscope.run.folder import RunError, process_of, user_name
from stepscope.run.rank_info import (
    UNREADABLE,
    RankFile,
    first_cause,
    left_early,
    moment,
    names,
    other_ranks,
    read_rank_file,
    read_run_json,
    required_time,
)
from stepscope.run.rank_status import absence, absences
from stepscope.run.status import HEARTBEAT_S, RunStatus

BYTES_LIMIT = 2**20
FILES_LIMIT = 64
TEXT_LIMIT = 500


def hung_in(folder: Path) -> str | None:
    """Return the cause of the hang in which a run's ranks ended; None where they did not hang.

    A rank removes its file once its steps go on, so one that is left is of the end. The first
    rank that hung has named the cause for all.
    """
    named = (_named(folder / name) for name in _names(folder))
    return next((text for text in named if text is not None), None)


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("hang-rank")]
    except OSError:
        return []
    return sorted(names, key=lambda name: (len(name), name))[:FILES_LIMIT]  # by number


def _named(path: Path) -> str | None:
    try:
        told: Any = json.loads(read_regular_file(path, BYTES_LIMIT))
        text = told["named"]["what"]
        return text[:TEXT_LIMIT] if isinstance(text, str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


_KEPT = "What was recorded is shown; resume from the last checkpoint."
GONE = f"gone without a word (killed, or the machine went down). {_KEPT}"
_OTHER_RUNNER = (
    "It was a thread of the page's server, which ended with it: with the runner process, only the "
    "training ends."
)

_HUNG = "It hung before:"
_MISMATCH = (
    " gloo aborts a rank that receives another size than it expects: one rank may have skipped a "
    "collective, or called it with another size."
)


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

    @property
    def ended(self) -> float | None:
        """End of the run in epoch seconds; None where run.json tells none that can be."""
        return moment(self.run_json.get("ended"))

    def __repr__(self) -> str:
        return f"RunInfo({self.id!r}, {self.status}, step {self.run_json.get('step', 0)})"


def read_only_reason(run: RunInfo) -> str | None:
    """Say why this process may only look at a run; None for one of its own host and user."""
    host, user = run.run_json.get("host"), run.run_json.get("user", user_name())
    if host != socket.gethostname():
        return f"This run belongs to the host {host}: read-only. Its buttons work on a page there."
    if user != user_name():
        return f"This run belongs to the user {user}: read-only."
    if not is_own_folder(run.folder):  # whoever copies a folder may have changed its run.json
        return "The folder of this run belongs to another user: read-only."
    return None


def read_run(folder: Path) -> RunInfo:
    """Return a run's run_json and its status as of now. Raises RunError for a corrupt file.

    A run of several ranks has ended as the rank that caused its end; it lives as long as rank 0.
    While it lives, its reason names the ranks that are gone or never came. That of a failure says
    what the ranks hung in before it, such as the time-out of a collective.
    """
    try:
        own = read_rank_file(folder, 0)
        required_time(own.run_json, "created")
    except OSError as error:
        raise RunError(f"{folder.name}: cannot read run.json ({error.strerror}).") from error
    except UNREADABLE as error:
        raise RunError(
            f"{folder.name}: run.json is not a Stepscope run ({error}). "
            "Delete the folder or restore the file."
        ) from error
    status, reason, cause = own.status, own.run_json.get("reason"), own
    if status is RunStatus.CRASHED:
        reason = _crash(folder, own.run_json)
    number, rank = cause.number, cause.rank
    if own.run_json.get("world_size", 1) != 1:
        told = None if status.live else _told_end(own.run_json)
        if told is not None:
            status, reason, number = told
            rank = number
        elif not status.live:
            status, reason, cause = _end_of_all(folder, [own, *other_ranks(folder)], reason)
            number, rank = cause.number, cause.rank
        hung = hung_in(folder) if status in (RunStatus.FAILED, RunStatus.CRASHED) else None
        if hung is not None and _HUNG not in str(reason):
            reason = f"{reason} {_HUNG} {hung[:1].lower()}{hung[1:]}"
        absent = absence(absences(folder, own, ended=not status.live))
        reason = " ".join(filter(None, (reason, absent))) or None
    return RunInfo(folder, status, reason, own.age_s, own.run_json, number, rank)


def run_json_of(run: RunInfo, number: int) -> dict[str, Any]:
    """Return what a rank says of itself, with what is in run.json alone: settings and the like."""
    if number == 0:
        return run.run_json
    try:
        own = read_run_json(run.folder, number)
    except UNREADABLE:
        own = {}
    return {key: run.run_json.get(key) for key in ("kind", "config", "environment")} | own


def restart_expected(run: RunInfo) -> bool:
    """Say whether torchrun, of this host and user, is about to start all ranks of a run again."""
    torchrun = run.run_json.get("torchrun")
    ended = run.status in (RunStatus.FAILED, RunStatus.CRASHED)
    if not ended or not isinstance(torchrun, dict) or read_only_reason(run) is not None:
        return False
    allowed, used = torchrun.get("max_restarts", 0), torchrun.get("restarts", 0)
    if type(allowed) is not int or type(used) is not int:
        return False  # not a file of ours
    return (
        allowed > used and "restarted_as" not in run.run_json and process_of(torchrun) is not None
    )


def rank_pids(run: RunInfo) -> Iterator[int]:
    """Return the numbers of the live processes of a run that are of this host and user.

    Those of other ranks stand in files of their own, which are read anew.
    """
    several = run.run_json.get("world_size", 1) != 1
    for rank in other_ranks(run.folder) if several else ():
        theirs = RunInfo(run.folder, rank.status, None, rank.age_s, rank.run_json)
        if rank.status.live and read_only_reason(theirs) is None:
            yield from _pid(rank.run_json)
    if run.status.live and read_only_reason(run) is None:
        yield from _pid(run.run_json)


def _told_end(run_json: dict[str, Any]) -> tuple[RunStatus, str, int] | None:
    """Return status, sentence and rank as who started the ranks has seen them end; None if not."""
    told = run_json.get("job_end")
    if not isinstance(told, dict) or type(told.get("rank")) is not int:
        return None
    try:
        return RunStatus(told["status"]), str(told["reason"]), told["rank"]
    except (KeyError, ValueError):
        return None


def _pid(run_json: dict[str, Any]) -> Iterator[int]:
    pid = run_json.get("pid")
    if type(pid) is int:
        yield pid


def _crash(folder: Path, run_json: Mapping[str, Any]) -> str:
    """Return why the only process of a run is gone."""
    killed_by = fatal_signal(folder, 0)
    if killed_by is None:
        return f"The training process is {GONE}"
    config = run_json.get("config")
    in_server = isinstance(config, dict) and config.get("runner") == "thread"
    reason = f"The training process was killed by {killed_by}. {_KEPT}"
    return f"{reason} {_OTHER_RUNNER}" if in_server else reason


def _end_of_all(
    folder: Path, ranks: list[RankFile], reason: str | None
) -> tuple[RunStatus, str | None, RankFile]:
    """Return the status and the sentence of a run of several ranks, and the rank that caused it."""
    ends = [end for end in (rank.end() for rank in ranks) if end is not None]
    causes = first_cause(ends, together_s=HEARTBEAT_S)
    if not causes:
        return ranks[0].status, reason, ranks[0]
    by_number = {rank.number: rank for rank in ranks}
    first = by_number[causes[0].number]
    numbers = sorted(by_number[end.number].rank for end in causes)
    if causes[0].reason is None:
        killed_by = fatal_signal(folder, first.number)
        who, what = names(numbers, len(ranks)), GONE
        if killed_by is not None:
            who, what = f"Rank {first.rank}", f"was killed by {killed_by}. {_KEPT}"
        return RunStatus.CRASHED, f"{who} {what}{_waited(ranks, killed_by)}", first
    if first.status is RunStatus.STOPPED:
        return RunStatus.STOPPED, causes[0].reason, first
    hosts = {str(rank.run_json.get("host")) for rank in ranks}
    text = causes[0].reason
    left = left_early(causes[0], [end for end in map(RankFile.finish, ranks) if end is not None])
    if left is not None:
        waiting, first = first, by_number[left.number]
        after = format_short_time(max(0.0, causes[0].earliest - left.earliest))
        text = (
            f"returned without an error after step {first.run_json.get('step') or 0:,}, "
            f"{after} before rank {waiting.rank} failed{waiting.failed_in}: {text}"
        )
    where = f" ({first.run_json.get('host')})" if len(hosts) > 1 else ""
    return RunStatus.FAILED, f"Rank {first.rank}{where}: {text}", first


def _waited(ranks: list[RankFile], killed_by: str | None) -> str:
    """Return a sentence on the collective that another rank failed in; "" where none did."""
    found = next((rank for rank in ranks if rank.failed_in), None)
    if found is None:
        return ""
    is_nccl = "NCCL" in str(found.run_json.get("reason")).upper()
    is_mismatch = (killed_by or "").startswith("SIGABRT") and not is_nccl
    return f" Rank {found.rank} failed{found.failed_in}.{_MISMATCH if is_mismatch else ''}"
