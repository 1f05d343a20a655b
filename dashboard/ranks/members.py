"""The ranks of a job by their files, which are untrusted: malformed entries are omitted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dashboard.charts.run_view import run_content, run_kind, training_device
from dashboard.run_analyzer import RunAnalyzer
from stepscope.common.formatting import printable
from stepscope.common.json_values import dict_of
from stepscope.run import RunInfo, RunKind
from stepscope.run.rank_info import find_rank, rank_numbers

MAX_RANKS_SHOWN = 64  # further ranks are counted only
MAX_LOCAL_RANKS = 16  # ranks of rank 0's machine, whose GPUs are sampled
MAX_HOST_CHARS = 40


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank: `number` is its folder rank, `rank` its global rank.

    `device`: "cpu", a GPU's UUID, or None if unknown. `gpus`: UUIDs that it samples, as the first
    rank of a host does.
    """

    number: int
    rank: int
    host: str
    device: str | None
    gpus: tuple[str, ...]
    local_rank: int | None


def read_member(folder: Path, number: int) -> RankEntry:
    """Read a rank file (0.2 ms); of an unreadable file only the number is known."""
    file = find_rank(folder, number)
    if file is None:
        return RankEntry(number, number, "?", None, (), None)
    info = RunInfo(folder, file.status, None, file.age_s, file.run_json)
    return RankEntry(
        number=number,
        rank=file.rank,
        host=printable(file.run_json.get("host") or "?")[:MAX_HOST_CHARS],
        device=training_device(info),
        gpus=tuple(gpu.uuid for gpu in run_content(info).gpus),
        local_rank=file.run_json.get("local_rank"),
    )


def _rank_devices(run: RunInfo) -> set[str | None]:
    numbers = rank_numbers(run.folder)[:MAX_LOCAL_RANKS]
    return {read_member(run.folder, number).device for number in numbers}


DEVICES = RunAnalyzer(_rank_devices, "the GPUs of the ranks cannot be read")


def used_gpus(run: RunInfo) -> frozenset[str]:
    """Return the UUIDs of the GPUs that a script trains on, of several that it can use.

    The devices of its ranks, and those whose process list has its pid, such as with DataParallel.
    Empty if unknown, and for a built-in run. Each poll calls it: a thread reads the ranks' files.
    """
    sampled = run_content(run).gpus
    if len(sampled) < 2 or run_kind(run) is RunKind.TRAINER:
        return frozenset()
    used = {training_device(run)}
    if run.world_size > 1:
        used |= DEVICES.of(run) or set()
    listed = dict_of(run.run_json.get("gpu_processes"))
    pid = run.run_json.get("pid")
    for uuid, processes in listed.items():
        pids = [dict_of(one).get("pid") for one in processes] if isinstance(processes, list) else []
        if pid is not None and pid in pids:
            used.add(uuid)
    return frozenset(gpu.uuid for gpu in sampled if gpu.uuid in used)


def places(members: Iterable[RankEntry]) -> list[str]:
    """Return the device of each rank, by its host's list or the local rank: "CPU", "GPU 3", ""."""
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
