"""What each process of a run says of itself in the run folder, judged now."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.run.clocks import ahead_of
from stepscope.run.first_cause import RankEnd
from stepscope.run.folder import rank_json
from stepscope.run.plain_file import read_plain
from stepscope.run.process import own_start, pid_namespace, process_of
from stepscope.run.status import FRESH_S, STALE_S, RunStatus

UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What reading a file of a run raises that is broken, or written by somebody else."""
RANKS_LIMIT = 4096
"""Ranks of a folder that are looked at; a run.json that speaks of more is not believed."""
BYTES_LIMIT = 16 * 2**20
"""Size up to which a rank's file is read: ours have some 10 kB, and the script's own settings."""
_LAST_S = 1e12
"""Epoch seconds from which a time is not believed: 30,000 years."""


def rank_numbers(folder: Path) -> list[int]:
    """Return the numbers of the ranks that have a run.json of their own in a folder, 0 always."""
    return [0, *(number for number in numbers_with(folder, "json") if number)]


def numbers_with(folder: Path, ending: str) -> list[int]:
    """Return the numbers K, in order, of which there is a file rankK.`ending`.

    Of more than RANKS_LIMIT the lowest; none where the folder cannot be listed. A name that we do
    not write, such as rank007.json, is left out.
    """
    try:
        names = "/".join(os.listdir(folder))  # no name has a slash
    except OSError:
        return []
    # One search in all names: asked at every poll, and each of 64 ranks has some files.
    found = re.findall(rf"(?<![^/])rank(0|[1-9][0-9]{{0,5}})\.{ending}(?![^/])", names)
    return sorted(map(int, found))[:RANKS_LIMIT]


def read_run_json(folder: Path, number: int) -> dict[str, Any]:
    """Return what a rank's file says. Raises UNREADABLE.

    A link is followed: some keep the files of their runs in another place.
    """
    told = json.loads(read_plain(folder / rank_json(number), BYTES_LIMIT, links=True))
    if not isinstance(told, dict):
        raise TypeError(f"must be an object, got a {type(told).__name__}")
    return told


def torch_rank(run_json: Mapping[str, Any], number: int) -> int:
    """Return torch's number of a rank: in the folder each machine may count from 0.

    The one in the folder where its file says none.
    """
    rank = run_json.get("rank")
    return rank if type(rank) is int else number


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's run_json with its status judged now; `beat` is its last sign of life.

    Times are by the clock of number 0's host, where the hosts' clocks have been compared.
    """

    number: int
    run_json: dict[str, Any]
    status: RunStatus
    beat: float
    age_s: float

    @property
    def rank(self) -> int:
        """torch's number of it."""
        return torch_rank(self.run_json, self.number)

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
        told = moment(ts)
        when = self.beat if told is None else told - ahead_of(self.run_json)
        return RankEnd(self.number, when, when, str(reason or "It gives no reason."))


def read_rank_file(folder: Path, number: int) -> RankFile:
    """Read the file of one rank and judge its status. Raises UNREADABLE."""
    run_json = read_run_json(folder, number)
    ahead_s = ahead_of(run_json)
    # A full disk keeps the old text, but the writer still touches the file. Its time may be by the
    # clock of the rank's host or by another one: the earlier of both is no later than the touch.
    touched = os.stat(folder / rank_json(number)).st_mtime - max(0.0, ahead_s)
    beat = max(float(run_json["heartbeat"]) - ahead_s, touched)
    status, age_s = RunStatus(run_json["status"]), max(0.0, time.time() - beat)
    if status.live and not _alive(run_json, age_s):
        status = RunStatus.CRASHED
    return RankFile(number, run_json, status, beat, age_s)


def moment(told: Any) -> float | None:
    """Return a time that a file tells, in epoch seconds; None for what can be none."""
    return float(told) if type(told) in (int, float) and abs(told) < _LAST_S else None


def find_rank(folder: Path, number: int) -> RankFile | None:
    """Return what a rank of a run says of itself; None without a file that can be read."""
    try:
        return read_rank_file(folder, number)
    except UNREADABLE:
        return None


def other_ranks(folder: Path) -> Iterator[RankFile]:
    """Yield the ranks of a folder but number 0; a file that cannot be read is left out."""
    for number in rank_numbers(folder)[1:]:
        if (rank := find_rank(folder, number)) is not None:
            yield rank


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
