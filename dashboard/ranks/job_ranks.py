"""The ranks of a job, read from their files: names, table and heatmaps for ranks_data.js."""

from __future__ import annotations

import base64
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dashboard.charts.series import fitting_bucket
from dashboard.ranks.members import MAX_RANKS_SHOWN, RankEntry, places, read_member
from stepscope.distributed import ranks_text
from stepscope.metrics import Stream
from stepscope.run import RunInfo, RunStatus
from stepscope.run.rank_info import RankMetadata, now_of, rank_numbers, wall_offset_of
from stepscope.run.rank_status import missing_ranks
from stepscope.store import SeriesBlock, SeriesInfo, StoreError, StoreReader
from stepscope.store.blocks import Floats

log = logging.getLogger(__name__)

Json = dict[str, Any]
NEWEST_ROWS = 128  # newest rows that the table shows
COLUMNS = 120
FIRST_WIDTHS = {"time": 0.25, "step": 1.0}  # smallest columns in seconds or steps
MAX_X = 1e9  # larger values come from a wrong clock or a damaged file
METRICS = (  # Metrics of the heatmap, in the order of the page.
    *("perf/step_time", "perf/comm_wait", "perf/data_wait"),
    *("memory/allocated", "process/rss", "gpu/util", "train/loss"),
)
HIGHEST = ("memory/allocated", "process/rss")  # the maximum of a column, not the mean
STATES = {  # The words of states that differ from those of a run.
    RunStatus.PENDING: "starting",
    RunStatus.RUNNING: "alive",
    RunStatus.PAUSED: "alive",
    RunStatus.CRASHED: "dead",
}


@dataclass(frozen=True, slots=True)
class MetricPoints:
    """Values (n,) of a metric for the rank in row `row`, at `xs` (n,) in seconds or steps."""

    row: int
    xs: Floats
    values: Floats
    counts: Floats


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Columns of `width` seconds or steps, and cells by metric."""

    width: float
    cells: Mapping[str, str]  # Base64 of float32 (columns, ranks); missing values are not finite.


@dataclass(frozen=True, slots=True)
class JobRanks:
    """The ranks as JSON values, and a heatmap for each axis."""

    table: Json
    heat: dict[str, Heatmap]


class _NewestRows:
    """The newest rows of one rank: `step`, and finite values (n,) by metric."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._values: dict[str, Floats] = defaultdict(lambda: np.empty(0))

    def take(self, block: SeriesBlock) -> None:
        if len(block):
            self.step = max(self.step or 0, int(np.nan_to_num(block.step[-1], posinf=0.0)))
        for key, values in zip(block.keys, block.mean, strict=True):
            self._values[key] = values[np.isfinite(values)]

    def mean(self, key: str) -> float | None:
        values = self._values[key]
        return float(np.mean(values)) if len(values) else None

    def last(self, key: str) -> float | None:
        values = self._values[key]
        return float(values[-1]) if len(values) else None

    def share(self, key: str) -> float | None:
        """Return a time in percent of the step time; None if one of them is unknown."""
        part, whole = self.mean(key), self.mean("perf/step_time")
        if part is None or not whole or whole < 0:
            return None
        return min(100.0, max(0.0, 100.0 * part / whole))


def ranks_answer(job: JobRanks | None, run: RunInfo, metric: str, axis: str) -> Json:
    """Return the table and one heatmap, of `metric` if recorded; neither before the first read."""
    live, run_json = run.status.live, run.run_json
    until = now_of(run_json) if live else run.ended
    if until is None:  # it crashed
        until = float(run_json.get("heartbeat") or run.created) - wall_offset_of(run_json)
    now = round(until - run.created, 1)
    shown = {"run": run.id, "live": live, "now": now, "axis": axis}
    if job is None:
        return shown
    heat = job.heat[axis]
    drawn = metric if metric in heat.cells else next(iter(heat.cells), None)
    strips = {"metrics": list(heat.cells), "metric": drawn, "width": heat.width}
    return shown | job.table | strips | {"cells": heat.cells.get(drawn or "", "")}


def read_job(run: RunInfo) -> JobRanks:
    """Read the ranks of a job, at most MAX_RANKS_SHOWN, from their files and stores."""
    numbers = rank_numbers(run.folder)
    members = [read_member(run.folder, number) for number in numbers[:MAX_RANKS_SHOWN]]
    newest = [_NewestRows() for _ in members]
    points: dict[str, dict[str, list[MetricPoints]]] = {
        axis: defaultdict(list) for axis in FIRST_WIDTHS
    }
    for own, member in enumerate(members):
        try:
            with StoreReader(run.folder, member.number) as reader:
                for info in reader.series():
                    whole = reader.read(info.id, 0, info.rows, fitting_bucket(info.rows))
                    for row in _rows_of(info, own, members):
                        for axis, name, found in points_of(whole, row, run.created):
                            points[axis][name].append(found)
                    if info.stream != Stream.DEVICES:
                        start = max(0, info.rows - NEWEST_ROWS)
                        newest[own].take(reader.read(info.id, start, info.rows, 1))
        except StoreError as error:  # being created, or damaged
            log.debug("rank %d of %s: %s", member.number, run.id, error)
    names = _names(run, members, len(numbers) - len(members))
    heat = {axis: heatmap(points[axis], len(members), axis) for axis in FIRST_WIDTHS}
    state: Json = {
        "state": [STATES.get(member.status, member.status) for member in members],
        "ends": [
            [row, _finite((member.ended or math.nan) - run.created), member.reason]
            for row, member in enumerate(members)
            if not member.status.live
        ],
    }
    return JobRanks(names | _table(newest) | state, heat)


def _rows_of(info: SeriesInfo, own: int, members: Sequence[RankEntry]) -> list[int]:
    """Return the rows of a series of rank `own`: those of a GPU are of the ranks on that GPU."""
    if info.stream != Stream.DEVICES:
        return [own]
    place = members[own].host, info.source
    return [row for row, member in enumerate(members) if (member.host, member.device) == place]


def _names(run: RunInfo, members: list[RankEntry], more: int) -> Json:
    missing = _missing(members, run)
    named = zip(members, places(members), strict=True)
    return {
        "ranks": [[member.rank, member.host, place] for member, place in named],
        "world_size": run.world_size,
        "missing": missing,
        "missing_text": missing_text(missing, more),
    }


ABSENT = {
    "starting": "{} recorded nothing yet.",
    "never started": "{} never started, or {} not watched.",
    "elsewhere": "{} {} recorded in another folder, if at all: hosts that share no disk have one "
    "each.",
    "not recorded": "{} did not call stepscope.init, or never started.",
}


def missing_text(missing: Mapping[str, list[int]], more: int) -> str:
    """Return a text on the ranks without a row, by state, and on `more` ranks not shown."""
    texts = [
        ABSENT[state].format(ranks_text(ranks).capitalize(), "is" if len(ranks) == 1 else "are")
        for state, ranks in missing.items()
    ]
    if more:
        texts.append(f"{more} more {'rank is' if more == 1 else 'ranks are'} recorded, not shown.")
    return " ".join(texts)


def _missing(members: list[RankEntry], run: RunInfo) -> dict[str, list[int]]:
    """Return the global ranks without a file by state; {} for jobs with more ranks than shown."""
    if run.world_size > MAX_RANKS_SHOWN:
        return {}
    file = RankMetadata(0, run.run_json, run.status, 0.0, 0.0)
    present = {member.rank for member in members}
    found: dict[str, list[int]] = defaultdict(list)
    for rank, standing in missing_ranks(
        file, present, ended=not run.status.live, now=now_of(run.run_json)
    ).items():
        found[standing.state.value].append(rank)
    return found


def _table(newest: Sequence[_NewestRows]) -> Json:
    on_gpu = any(each.last("memory/allocated") is not None for each in newest)
    memory, peak = (
        ("memory/allocated", "memory/peak_allocated")
        if on_gpu
        else ("process/rss", "process/peak_rss")
    )

    def column(value: Callable[[_NewestRows], float | None]) -> list[float | None]:
        return [_finite(value(each)) for each in newest]

    return {
        "table": {
            "step": [each.step for each in newest],
            "time": column(lambda each: each.mean("perf/step_time")),
            "wait": column(lambda each: each.share("perf/comm_wait")),
            "data": column(lambda each: each.share("perf/data_wait")),
            "memory": column(lambda each: each.last(memory)),
            "peak": column(lambda each: each.last(peak)),
        },
        "memory": "allocated" if on_gpu else "process",
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def points_of(
    block: SeriesBlock, row: int, created: float
) -> Iterator[tuple[str, str, MetricPoints]]:
    """Yield axis, metric and points of a series; time is in seconds since `created`."""
    for axis, xs in (("time", block.ts - created), ("step", block.step)):
        known = np.isfinite(xs) & (xs < MAX_X)
        for place, name in enumerate(block.keys):
            good = known & (block.count[place] > 0)
            if name in METRICS and good.any():
                values = (block.high if name in HIGHEST else block.mean)[place]
                counts = block.count[place][good]
                yield axis, name, MetricPoints(row, np.maximum(xs[good], 0), values[good], counts)


def heatmap(points: Mapping[str, Sequence[MetricPoints]], ranks: int, axis: str) -> Heatmap:
    """Return the heatmap of all metrics on an axis; the columns hold the whole run."""
    ends = [float(each.xs.max()) for listed in points.values() for each in listed]
    width, latest = FIRST_WIDTHS[axis], max(ends, default=0.0)
    while latest >= COLUMNS * width:
        width *= 2
    shape = int(latest / width) + 1, ranks
    recorded = [name for name in METRICS if name in points]
    with np.errstate(over="ignore", invalid="ignore"):  # damaged files
        return Heatmap(
            width, {name: _cells(points[name], shape, width, name in HIGHEST) for name in recorded}
        )


def _cells(
    points: Sequence[MetricPoints], shape: tuple[int, int], width: float, highest: bool
) -> str:
    sums, counts, tops = np.zeros(shape), np.zeros(shape), np.full(shape, -np.inf)
    for each in points:
        at = (each.xs / width).astype(np.intp)
        sums[:, each.row] += np.bincount(at, each.values * each.counts, shape[0])
        counts[:, each.row] += np.bincount(at, each.counts, shape[0])
        np.maximum.at(tops[:, each.row], at, each.values)
    means = np.divide(sums, counts, out=np.full(shape, np.nan), where=counts > 0)
    return base64.b64encode((tops if highest else means).astype("<f4").tobytes()).decode()
