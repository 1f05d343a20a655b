"""The ranks of a job, read from their files: their devices, and a table of their newest values.

The files are untrusted: malformed entries are omitted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dashboard.charts.run_view import run_content, run_kind, training_device
from dashboard.run_analyzer import RunAnalyzer
from stepscope.common.formatting import format_duration, printable
from stepscope.common.json_values import dict_of
from stepscope.common.metrics import Stream
from stepscope.run import RunInfo, RunKind
from stepscope.run.rank_info import find_rank, rank_numbers
from stepscope.run.rank_status import JobRank, RankStatus, ranks_of
from stepscope.store import SeriesBlock, StoreError, StoreReader
from stepscope.store.blocks import Floats

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


log = logging.getLogger(__name__)

NEWEST_ROWS = 128  # newest rows that the table shows
MAX_REASON_CHARS = 120
GIB = 2.0**30
Row = dict[str, Any]  # Values by column title.


@dataclass(frozen=True, slots=True)
class JobRanks:
    """The rows of the table, and the number of ranks that are left out."""

    rows: list[Row]
    left_out: int


@dataclass(slots=True)
class _RankValues:
    """What is read of one rank: its newest values by metric."""

    step: int | None = None
    newest: dict[str, Floats] = field(default_factory=dict)

    def add(self, block: SeriesBlock) -> None:
        for key, values in zip(block.keys, block.mean, strict=True):
            self.newest[key] = values[np.isfinite(values)]

    def mean(self, key: str) -> float | None:
        values = self.newest.get(key, np.empty(0))
        return float(np.mean(values)) if len(values) else None

    def last(self, *keys: str) -> float | None:
        """Return the newest value of the first of these metrics that has one."""
        found = (self.newest[key] for key in keys if len(self.newest.get(key, ())))
        return next((float(values[-1]) for values in found), None)

    @property
    def busy_s(self) -> float | None:
        """Mean time of a step without waiting for other ranks; None if unknown."""
        time = self.mean("perf/step_time")
        wait = self.mean("perf/comm_wait")
        return None if time is None or wait is None else time - wait

    def share(self, key: str) -> float | None:
        """Return a time in percent of the step time; None if one of them is unknown."""
        part = self.mean(key)
        whole = self.mean("perf/step_time")
        return None if part is None or not whole else 100.0 * part / whole


def read_job(run: RunInfo) -> JobRanks:
    """Read the ranks of a job, at most MAX_RANKS_SHOWN, from their files and stores."""
    states = ranks_of(run.folder)
    shown = states[:MAX_RANKS_SHOWN]
    recorded = {state.rank: state.number for state in shown if state.number is not None}
    members = [read_member(run.folder, number) for number in recorded.values()]
    values = [_RankValues() for _ in members]
    for own, member in enumerate(members):
        try:
            with StoreReader(run.folder, member.number) as reader:
                for info in reader.series():
                    start = max(0, info.rows - NEWEST_ROWS)
                    newest = reader.read(info.id, start, info.rows, 1)
                    on_device = info.stream == Stream.DEVICES
                    place = member.host, info.source
                    for row, other in enumerate(members):
                        if (other.host, other.device) == place if on_device else row == own:
                            values[row].add(newest)
                    if len(newest) and not on_device:
                        step = int(np.nan_to_num(newest.step[-1], posinf=0.0))
                        values[own].step = max(values[own].step or 0, step)
        except StoreError as error:  # being created, or damaged
            log.debug("rank %d of %s: %s", member.number, run.id, error)
    rows = _table(shown, dict(zip(recorded, members, strict=True)), values, run.created)
    return JobRanks(rows, left_out=len(states) - len(shown))


def _table(
    states: Sequence[JobRank],
    members: Mapping[int, RankEntry],
    values: Sequence[_RankValues],
    created: float,
) -> list[Row]:
    """Return a row per rank, without columns in which no rank has a value.

    `members` by global rank, in the order of `values`.
    """
    rows: dict[int, Row] = {}
    for state in states:
        row: Row = {"Rank": state.rank, "Status": state.status.value}
        if state.status is not RankStatus.ALIVE:
            row["Ended after"] = None
            if state.info is not None:
                ended = state.run_json.get("ended") or state.info.beat
                row["Ended after"] = format_duration(max(0.0, ended - created))
            row["Reason"] = printable(state.text)[:MAX_REASON_CHARS]
        rows[state.rank] = row
    busy = [each.busy_s for each in values]
    known = [seconds for seconds in busy if seconds is not None]
    median = float(np.median(known)) if known else 0.0
    named = zip(members.items(), places(members.values()), values, busy, strict=True)
    for (rank, member), place, each, seconds in named:
        time = each.mean("perf/step_time")
        memory = each.last("memory/allocated", "process/rss")
        peak = each.last("memory/peak_allocated", "process/peak_rss")
        rows[rank] |= {
            "Host": member.host,
            "Device": place,
            "Last step": each.step,
            "Step time": None if time is None else 1e3 * time,
            "Lateness": None if seconds is None else 1e3 * (seconds - median),
            "Wait for ranks": each.share("perf/comm_wait"),
            "Data wait": each.share("perf/data_wait"),
            "Memory": None if memory is None else memory / GIB,
            "Peak memory": None if peak is None else peak / GIB,
            "Utilization": each.mean("gpu/util"),
        }
    filled = {name for row in rows.values() for name, value in row.items() if value is not None}
    return [{name: row[name] for name in row if name in filled} for row in rows.values()]
