"""Read the metadata of each rank, and find the rank that failed first."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, get_type_hints

import msgspec

from stepscope.common.files import read_json
from stepscope.run.folder import SIGTERM, fatal_signal, is_here, process_of, rank_json
from stepscope.run.status import HEARTBEAT_S, STALE_S, RunStatus

NAMED = 8  # maximum number of ranks in a sentence

_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|Broken pipe|pair closure|remote process exited|ncclRemoteError"
)
"""Messages of gloo and NCCL that only the exit of another process causes."""
_OF_A_PEER = re.compile(
    rf"{_LOST_PEER.pattern}|Connection refused|Socket Timeout|DistNetworkError|DistStoreError"
    r"|collective operation timeout|[Tt]imed out waiting \w+ for \w+ operation|wait timeout after"
    r"|another rank (?:had )?failed"
)
"""These, and messages of TCPStore and Stepscope, about another rank that is lost or late."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """End of one rank between two epoch seconds, and the `reason` that it wrote, or None.

    `terminated`: SIGTERM has ended it, which launchers send to the ranks left after a failure.
    """

    number: int
    earliest: float
    latest: float
    reason: str | None
    terminated: bool = False


def of_a_peer(reason: str | None) -> bool:
    """Return True if a rank with this reason ended because another rank had ended."""
    return reason is not None and _OF_A_PEER.search(reason) is not None


def first_cause(ends: Sequence[RankExit]) -> list[RankExit]:
    """Return the ends that caused the others; empty without ends.

    Connection errors are ignored if a rank has another error; then the earliest end counts. All
    ranks that exited without a reason within HEARTBEAT_S are returned, and of these only ranks that
    were not terminated, if there are any.
    """
    spoken = sorted((end for end in ends if end.reason is not None), key=lambda end: end.earliest)
    gone = sorted((end for end in ends if end.reason is None), key=lambda end: end.earliest)
    gone = [end for end in gone if not end.terminated] or gone
    own = next((end for end in spoken if not of_a_peer(end.reason)), None)
    if own is not None and (not gone or own.earliest <= gone[0].latest):
        return [own]
    # A lost connection is the exit of its peer, whose host or disk may have another clock.
    margin_s = STALE_S if spoken and _LOST_PEER.search(spoken[0].reason or "") else 0.0
    if gone and (not spoken or gone[0].earliest <= spoken[0].earliest + margin_s):
        return [end for end in gone if end.earliest <= gone[0].earliest + HEARTBEAT_S]
    return spoken[:1]


def names(numbers: Sequence[int], world_size: int) -> str:
    """Return these ranks as the subject of a sentence, with its "is" or "are"."""
    if len(numbers) == 1:
        return f"Rank {numbers[0]} is"
    if len(numbers) == world_size:
        return f"All {world_size} ranks are"
    listed = ", ".join(str(number) for number in numbers[:NAMED])
    return f"Ranks {listed}{', …' if len(numbers) > NAMED else ''} are"


UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Exceptions of reading a damaged or untrusted file of a run."""
RANKS_LIMIT = 4096  # maximum number of ranks in a folder
RUN_VERSION = 1  # `schema` of run.json; files of another version are refused.
BYTES_LIMIT = 16 * 2**20
"""Maximum size of a rank's file: about 10 kB, plus the settings of the script."""
_LAST_S = 4_102_444_800.0  # 2100-01-01 in epoch seconds. Tables end in 2262, `datetime` in 9999.
_REQUIRED = ("created", "heartbeat", "status", "mirror")
_Text = Annotated[str, msgspec.Meta(max_length=100_000)]
_Count = Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
_Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Moment = Annotated[float, msgspec.Meta(ge=0, lt=_LAST_S)]


class RankFailure(TypedDict):
    """The exception that ended a script, of which it may still run handlers."""

    ts: _Moment
    reason: NotRequired[_Text | None]


class MirrorState(TypedDict):
    """State of another host's run, written by `stepscope.remote.mirror`."""

    source: _Text
    age_s: _Moment
    alive: bool | None
    received: _Moment
    reason: _Text | None


class RunJson(TypedDict):
    """Type of each field of run.json that Stepscope reads, as in docs/storage.md."""

    name: _Text
    kind: _Text
    note: _Text
    status: RunStatus
    reason: _Text
    created: _Moment
    heartbeat: _Moment
    ended: _Moment
    stop_asked: _Moment
    host: _Text
    user: _Text
    pid: _Count
    pid_ticks: _Count
    pid_namespace: _Text
    rank: _Rank
    local_rank: _Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, le=RANKS_LIMIT)]
    folder_of: _Text
    slurm: dict[str, Any]
    failure: RankFailure
    mirror: MirrorState
    step: _Count
    epoch: _Count
    epochs: _Count
    total_steps: _Count
    dropped: _Count
    dropped_reason: _Text
    problem: _Text
    oom_kills: dict[str, Any]
    config: dict[str, Any]
    settings: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=64)]
    tags: list[Any]
    script: dict[str, Any]
    environment: dict[str, Any]
    capabilities: dict[str, Any]
    commands: list[_Text]
    custom: list[_Text]
    optimizers: list[_Text]
    parameters: _Count
    device: _Text
    devices: list[dict[str, Any]]
    gpu_processes: dict[str, Any]
    compute_capability: list[Any]
    flops_per_step: _Number
    flops_reason: _Text
    peak_reason: _Text


_TYPES = get_type_hints(RunJson, include_extras=True)


class RunVersionError(ValueError):
    """A run.json of another version; the message says what to do."""


def rank_numbers(folder: Path) -> list[int]:
    """Return the folder ranks that have a metadata file, always including 0."""
    return [0, *(number for number in numbers_with(folder, "json") if number)]


def numbers_with(folder: Path, ending: str) -> list[int]:
    """Return K of each file rankK.`ending` (a pattern), sorted, at most RANKS_LIMIT."""
    try:
        names = "/".join(os.listdir(folder))  # no name has a slash
    except OSError:
        return []
    # One search in all names: this runs at every poll, and each of 64 ranks has some files.
    numbers = re.findall(rf"(?<![^/])rank(0|[1-9][0-9]{{0,5}})\.{ending}(?![^/])", names)
    return sorted(map(int, numbers))[:RANKS_LIMIT]


def read_run_json(folder: Path, number: int) -> dict[str, Any]:
    """Return a rank's metadata without invalid optional fields. Raises UNREADABLE.

    Raises RunVersionError, one of these, for a file of another version.
    """
    content = read_json(folder / rank_json(number), BYTES_LIMIT, follow_links=True)
    if not isinstance(content, dict):
        raise TypeError(f"must be an object, got a {type(content).__name__}")
    version = content.get("schema", RUN_VERSION)
    if version != RUN_VERSION:
        raise RunVersionError(
            f"{rank_json(number)} has version {version!r:.20} and this Stepscope reads version "
            f"{RUN_VERSION}. Use the Stepscope that recorded the run."
        )
    return {name: value for name, value in content.items() if _is_valid(name, value)}


def _is_valid(name: str, value: Any) -> bool:
    """Return True if a field may have this value. Raises ValueError for a required field."""
    kind = _TYPES.get(name)
    if kind is None or value is None:
        return True
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if name in _REQUIRED:
            raise ValueError(f"{name}: {error}, got {value!r:.80}") from None
        return False
    return True


def required(run_json: Mapping[str, Any], name: str) -> Any:
    """Return a required field. Raises ValueError if it is missing."""
    if run_json.get(name) is None:
        raise ValueError(f"{name}: must be set, got nothing")
    return run_json[name]


def torch_rank(run_json: Mapping[str, Any], number: int) -> int:
    """Return the global rank of a metadata file; the folder rank `number` without it."""
    rank: int | None = run_json.get("rank")
    return number if rank is None else rank


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Metadata and present status of one rank.

    `beat` is the last heartbeat; `age_s` is its age. `terminated`: it crashed by SIGTERM.
    """

    number: int
    run_json: dict[str, Any]
    status: RunStatus
    beat: float
    age_s: float
    terminated: bool = False

    @property
    def rank(self) -> int:
        """Global rank."""
        return torch_rank(self.run_json, self.number)

    def end(self) -> RankExit | None:
        """Return the failure of the rank; None if it is live or has finished."""
        failure = self.run_json.get("failure")
        if failure is not None and self.status is not RunStatus.STOPPED:
            return self._end_at(failure["ts"], failure.get("reason"))
        if self.status in (RunStatus.FAILED, RunStatus.STOPPED):
            return self._end_at(self.run_json.get("ended"), self.run_json.get("reason"))
        if self.status is RunStatus.CRASHED:
            return RankExit(self.number, self.beat, self.beat + STALE_S, None, self.terminated)
        return None

    def _end_at(self, ts: float | None, reason: str | None) -> RankExit:
        when = self.beat if ts is None else ts
        return RankExit(self.number, when, when, reason or "It gives no reason.")


def read_rank_file(folder: Path, number: int) -> RankInfo:
    """Read the file of one rank and determine its status. Raises UNREADABLE."""
    run_json = read_run_json(folder, number)
    # On a full disk the file keeps its content, but the writer still touches it.
    touched = os.stat(folder / rank_json(number)).st_mtime
    mirror = run_json.get("mirror")
    heartbeat = float(required(run_json, "heartbeat"))
    beat = heartbeat if mirror is not None else max(heartbeat, touched)
    status, age_s = RunStatus(required(run_json, "status")), max(0.0, time.time() - beat)
    if mirror is not None:
        age_s = mirror["age_s"]  # by the other host's clock, at the last answer
    if status.live and not _alive(run_json, age_s):
        status = RunStatus.CRASHED
    terminated = status is RunStatus.CRASHED and fatal_signal(folder, number) == SIGTERM
    return RankInfo(number, run_json, status, beat, age_s, terminated)


def find_rank(folder: Path, number: int) -> RankInfo | None:
    """Return the metadata of a rank; None if it is missing or unreadable."""
    try:
        return read_rank_file(folder, number)
    except UNREADABLE:
        return None


def readable_ranks(folder: Path, first: int = 0) -> Iterator[RankInfo]:
    """Yield the readable metadata of the folder ranks from `first` on."""
    for number in rank_numbers(folder)[first:]:
        if (rank := find_rank(folder, number)) is not None:
            yield rank


def _alive(run_json: dict[str, Any], heartbeat_age_s: float) -> bool:
    mirror = run_json.get("mirror")
    if mirror is not None:
        return heartbeat_age_s < STALE_S if mirror["alive"] is None else bool(mirror["alive"])
    if not is_here(run_json):
        return heartbeat_age_s < STALE_S
    return process_of(run_json) is not None
