"""The ranks of a job, read from their rank files: host, device and status.

Rank files are untrusted: missing or malformed entries are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dashboard.charts.run_view import run_content, training_device
from stepscope.common.formatting import printable
from stepscope.run import RunInfo, RunStatus
from stepscope.run.rank_info import find_rank

MAX_RANKS_SHOWN = 64  # further ranks are counted only
MAX_HOST_CHARS = 40
MAX_REASON_CHARS = 120


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank: `number` is its folder rank, `rank` its global rank.

    `device` is "cpu", a GPU's UUID, or None if unknown. `gpus` are the UUIDs that it samples: the
    first rank of a host samples all of them. `ended` is its end in epoch seconds, the last
    heartbeat if it crashed, None while it is live.
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


def read_member(folder: Path, number: int) -> RankEntry:
    """Read a rank file (0.2 ms); a rank with an unreadable file is pending, with a reason."""
    file = find_rank(folder, number)
    if file is None:
        text = "Its file cannot be read."
        return RankEntry(number, number, "?", None, (), None, RunStatus.PENDING, None, text)
    ended = None if file.status is RunStatus.CRASHED else file.run_json.get("ended")
    info = RunInfo(folder, file.status, None, file.age_s, file.run_json)
    reason = file.run_json.get("reason")
    return RankEntry(
        number=number,
        rank=file.rank,
        host=printable(file.run_json.get("host") or "?")[:MAX_HOST_CHARS],
        device=training_device(info),
        gpus=tuple(gpu.uuid for gpu in run_content(info).gpus),
        local_rank=file.run_json.get("local_rank"),
        status=file.status,
        ended=None if file.status.live else file.beat if ended is None else ended,
        reason=None if reason is None else printable(reason)[:MAX_REASON_CHARS],
    )


def places(members: Iterable[RankEntry]) -> list[str]:
    """Return the device of each rank as text: "CPU", "GPU 3", "" if unknown.

    The index of a GPU comes from its host's list, else from the local rank.
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
