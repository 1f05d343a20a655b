"""The ranks of a job as their own files tell of them: where each runs, and whether it lives.

Others may have written those files: what they lack or hold in another form is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dashboard.charts.run_view import MOST_RANKS, run_content, training_device
from stepscope.common.formatting import printable
from stepscope.run import RunInfo, RunStatus
from stepscope.run.rank_info import RankMetadata, find_rank

MOST = 64  # Ranks of a job that are shown; the others are counted.
HOST_LENGTH = 40
REASON_LENGTH = 120


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank: `number` counts the processes in the folder, `rank` is torch's number.

    `device` is "cpu", a GPU's UUID or None where nobody knows yet. `gpus` are the UUIDs that it
    lists: the first rank of a host samples them for all. `ended` is when it ended in epoch seconds,
    or was last heard of where it died; None while it lives.
    """

    number: int
    rank: int
    host: str
    device: str | None
    gpus: tuple[str, ...]
    local_rank: int | None
    status: RunStatus
    ended: float | None = None
    reason: str | None = None


def read_member(folder: Path, number: int) -> RankEntry | None:
    """Return a rank as its file tells of it now, in 0.2 ms; None where it cannot be read."""
    file = find_rank(folder, number)
    if file is None:
        return None
    info = RunInfo(folder, file.status, None, file.age_s, file.run_json)
    local, reason = file.run_json.get("local_rank"), file.run_json.get("reason")
    return RankEntry(
        number=number,
        rank=file.rank if 0 <= file.rank < MOST_RANKS else number,
        host=printable(str(file.run_json.get("host") or "?"))[:HOST_LENGTH],
        device=training_device(info),
        gpus=tuple(gpu.uuid for gpu in run_content(info).gpus),
        local_rank=local if type(local) is int and 0 <= local < MOST_RANKS else None,
        status=file.status,
        ended=_ended(file),
        reason=printable(reason)[:REASON_LENGTH] if isinstance(reason, str) else None,
    )


def unreadable(number: int) -> RankEntry:
    """Return a rank of which nothing is known but that it has a file."""
    pending = RunStatus.PENDING
    return RankEntry(number, number, "?", None, (), None, pending, None, "Its file cannot be read.")


def places(members: Iterable[RankEntry]) -> list[str]:
    """Return the device of each rank in a few letters: "CPU", "GPU 3", "" where nobody knows.

    A GPU has the index that its host's list gives it; without such a list that of the local rank.
    """
    members = list(members)
    indices = {
        (member.host, uuid): index for member in members for index, uuid in enumerate(member.gpus)
    }
    found = []
    for member in members:
        if member.device in (None, "cpu"):
            found.append("CPU" if member.device else "")
            continue
        index = indices.get((member.host, member.device), member.local_rank)
        found.append("GPU" if index is None else f"GPU {index}")
    return found


def _ended(file: RankMetadata) -> float | None:
    """Return when a rank ended, or was last heard of, in epoch seconds."""
    if file.status.live:
        return None
    ended = None if file.status is RunStatus.CRASHED else file.run_json.get("ended")
    return file.beat if ended is None else ended
