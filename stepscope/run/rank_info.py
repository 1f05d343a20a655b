"""Read what each rank wrote in the run folder, and which rank failed first."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.common.files import read_json
from stepscope.run.clocks import wall_offset_of
from stepscope.run.folder import own_start, pid_namespace, process_of, rank_json
from stepscope.run.status import FRESH_S, STALE_S, RunStatus

NAMED = 8
"""Ranks that a sentence names at most."""

_OF_A_PEER = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|pair closure|Socket Timeout"
    r"|remote process exited|ncclRemoteError|DistNetworkError|DistStoreError"
    r"|collective operation timeout|[Tt]imed out waiting \w+ for \w+ operation|wait timeout after"
    r"|another rank had failed"
)
"""Words of gloo, NCCL, torch's store and our own when another rank is gone, or does not come."""
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|Broken pipe|pair closure|remote process exited|ncclRemoteError"
)
"""Those of them that a process which is gone leaves behind, and one that is late does not."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended: `reason` is what it wrote itself, None if it wrote nothing.

    It ended between `earliest` and `latest`, in epoch seconds: they are equal if it wrote when.
    """

    number: int
    earliest: float
    latest: float
    reason: str | None

    @property
    def of_a_peer(self) -> bool:
        """Say whether it ended because another rank had."""
        return self.reason is not None and _OF_A_PEER.search(self.reason) is not None

    @property
    def lost_peer(self) -> bool:
        """Say whether it ended because the process of another rank was gone."""
        return self.reason is not None and _LOST_PEER.search(self.reason) is not None


def first_cause(ends: Sequence[RankEnd], *, together_s: float) -> list[RankEnd]:
    """Return the end that caused the others; empty without ends.

    An error about the connection to another rank is a cause only if there is no other error. Among
    the rest the earliest end counts. A rank that is gone without a word comes before one that has
    lost the connection to it, by STALE_S at most: hosts' clocks differ, and a file may be written
    once more. Ranks that ended without a reason within `together_s` of each other are all returned:
    which was first is not known.
    """
    spoken = sorted((end for end in ends if end.reason is not None), key=lambda end: end.earliest)
    gone = sorted((end for end in ends if end.reason is None), key=lambda end: end.earliest)
    own = next((end for end in spoken if not end.of_a_peer), None)
    if own is not None and (not gone or own.earliest <= gone[0].latest):
        return [own]
    margin_s = STALE_S if spoken and spoken[0].lost_peer else 0.0
    if gone and (not spoken or gone[0].earliest <= spoken[0].earliest + margin_s):
        return [end for end in gone if end.earliest <= gone[0].earliest + together_s]
    return spoken[:1]


def left_early(cause: RankEnd, finished: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that returned without an error while `cause` still needed it, if one did.

    A cause of another kind than a lost connection has no such rank.
    """
    if not cause.of_a_peer:
        return None
    margin_s = STALE_S if cause.lost_peer else 0.0
    before = (end for end in finished if end.earliest <= cause.earliest + margin_s)
    return min(before, key=lambda end: end.earliest, default=None)


def names(numbers: Sequence[int], world_size: int) -> str:
    """Return these ranks as the subject of a sentence, with its "is" or "are"."""
    if len(numbers) == 1:
        return f"Rank {numbers[0]} is"
    if len(numbers) == world_size:
        return f"All {world_size} ranks are"
    listed = ", ".join(str(number) for number in numbers[:NAMED])
    return f"Ranks {listed}{', …' if len(numbers) > NAMED else ''} are"


UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What reading a file of a run raises that is broken, or written by somebody else."""
RANKS_LIMIT = 4096
"""Ranks of a folder that are looked at; a run.json that speaks of more is not believed."""
BYTES_LIMIT = 16 * 2**20
"""Size up to which a rank's file is read: ours have some 10 kB, and the script's own settings."""
_LAST_S = 4_102_444_800.0
"""2100-01-01 in epoch seconds: a later time is none. Tables end in 2262, `datetime` in 9999."""
_AHEAD_S = 3600.0
"""Time by which a sign of life may lie in the future: clocks are set, and differ by time zones."""
_TEXT_LIMIT = 100_000
"""Characters of a text in run.json; a longer one counts as missing."""
_TIMES = ("created", "heartbeat", "ended", "stop_asked")
_FIELDS: dict[type, tuple[str, ...]] = {
    str: ("name", "note", "status", "reason", "kind", "host", "user", "device", "problem")
    + ("pid_namespace", "folder_of", "restarted_as", "data", "flops_reason", "peak_reason")
    + ("waited_in",),
    int: ("pid", "step", "epoch", "epochs", "total_steps", "steps_per_epoch", "first_step")
    + ("world_size", "rank", "local_rank", "local_world_size", "dropped", "dropped_values")
    + ("batch_size", "parameters", "device_memory"),
    float: (*_TIMES, "pid_started", "paused_s", "wall_offset_s", "flops_per_step", "peak_flops"),
    dict: ("config", "environment", "capabilities", "script", "failure", "job_end", "torchrun")
    + ("restart", "resumed", "fit", "link", "oom_kills", "gpu_processes"),
    list: ("devices", "commands", "custom", "optimizers", "compute_capability"),
}
_TYPE_OF = {name: kind for kind, names in _FIELDS.items() for name in names}


def rank_numbers(folder: Path) -> list[int]:
    """Return the numbers of the ranks that have a run.json of their own in a folder, 0 always."""
    return [0, *(number for number in numbers_with(folder, "json") if number)]


def numbers_with(folder: Path, ending: str) -> list[int]:
    """Return the numbers K, in order, of which there is a file rankK.`ending`, a pattern.

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
    """Return what a rank's file says, without fields of another type than ours. Raises UNREADABLE.

    A link is followed: some keep the files of their runs in another place.
    """
    told = read_json(folder / rank_json(number), BYTES_LIMIT, follow_links=True)
    if not isinstance(told, dict):
        raise TypeError(f"must be an object, got a {type(told).__name__}")
    return {name: value for name, value in told.items() if _is_valid(name, value)}


def _is_valid(name: str, value: Any) -> bool:
    """Return True if a field of run.json can have this value; any field may be null."""
    kind = _TYPE_OF.get(name)
    if value is None or kind is None:
        return True
    if name in _TIMES:
        return moment(value) is not None
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # NaN is not
    if kind is int:
        return type(value) is int and abs(value) < 2**63
    return isinstance(value, kind) and (kind is not str or len(str(value)) <= _TEXT_LIMIT)


def torch_rank(run_json: Mapping[str, Any], number: int) -> int:
    """Return torch's number of a rank: in the folder each machine may count from 0.

    The one in the folder where its file says none.
    """
    rank = run_json.get("rank")
    return rank if type(rank) is int else number


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's run_json with its status judged now.

    `beat` is its last sign of life, by the clock of its process as are its rows, and `age_s` the
    age of that by the wall clock.
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

    def finish(self) -> RankEnd | None:
        """Return when it returned without an error; None where it did not."""
        if self.status is not RunStatus.FINISHED or self.end() is not None:
            return None
        return self._said(self.run_json.get("ended"), None)

    @property
    def failed_in(self) -> str:
        """The collective in which it failed, as the end of a clause; "" where none is known."""
        return f" in {told[:200]}" if (told := self.run_json.get("waited_in")) else ""

    def _said(self, ts: Any, reason: Any) -> RankEnd:
        told = moment(ts)
        when = self.beat if told is None else told
        return RankEnd(self.number, when, when, str(reason or "It gives no reason."))


def read_rank_file(folder: Path, number: int) -> RankFile:
    """Read the file of one rank and judge its status. Raises UNREADABLE."""
    run_json = read_run_json(folder, number)
    # A full disk keeps the old text, but the writer still touches the file.
    touched = os.stat(folder / rank_json(number)).st_mtime
    signs, now = [required_time(run_json, "heartbeat"), touched], time.time()
    # One far in the future is no sign of life: it would be one for ever. Of a host whose clock is
    # wrong by hours, the disk may still stamp the files with the right time.
    beat = max([sign for sign in signs if sign < now + _AHEAD_S] or signs)
    status, age_s = RunStatus(run_json["status"]), now - beat
    if age_s < 0:
        age_s = 0.0 if age_s > -_AHEAD_S else -age_s
    if status.live and not _alive(run_json, age_s):
        status = RunStatus.CRASHED
    # Heartbeats and times of files are by the wall clock, all else by that of the process.
    return RankFile(number, run_json, status, beat - wall_offset_of(run_json), age_s)


def moment(told: Any) -> float | None:
    """Return a time that a file tells, in epoch seconds; None for what can be none."""
    return float(told) if type(told) in (int, float) and 0 <= told < _LAST_S else None


def required_time(run_json: Mapping[str, Any], name: str) -> float:
    """Return a time that each run has, in epoch seconds. Raises ValueError without one."""
    found = moment(run_json.get(name))
    if found is None:
        raise ValueError(f"{name}: must be a time between 1970 and 2100 in epoch seconds")
    return found


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
