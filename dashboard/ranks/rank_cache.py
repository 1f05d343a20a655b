"""The server's cache of one job's ranks for all tabs: a few hundred kB.

Each request reads as many ranks as fit into a few milliseconds, the longest unread first, so an
answer takes as long for 64 ranks as for two. The first reading of a long run takes the store's
rollups, later ones only new rows.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dashboard.ranks.members import MAX_RANKS_SHOWN, RankEntry, read_member, unreadable
from dashboard.ranks.time_grid import COLUMNS, FIRST_WIDTHS, HeatmapMetric, TimeGrid
from stepscope.metrics import Stream
from stepscope.run import RunInfo
from stepscope.run.rank_info import rank_numbers
from stepscope.store import SeriesBlock, SeriesInfo, StoreError, StoreReader, store_name
from stepscope.store.blocks import FACTOR, Floats

log = logging.getLogger(__name__)

BUDGET_S = 0.004  # CPU time per request; a started series is finished
FIRST_BUDGET_S = 0.006  # CPU time per request until every rank has been read
MAX_WALL_S = 0.03  # for slow disks and busy machines
MEMBER_INTERVAL_S = 2.0  # between two readings of a rank file
TAIL_ROWS = 128  # newest rows that the table shows
MAX_NEW_ROWS = 2048  # with more new rows, the whole run is read as an overview
UTIL = "gpu/util"
STRIPS = (
    HeatmapMetric("perf/step_time"),
    HeatmapMetric("perf/comm_wait"),
    HeatmapMetric("perf/data_wait"),
    HeatmapMetric("memory/allocated", highest=True),
    HeatmapMetric("process/rss", highest=True),
    HeatmapMetric(UTIL),
    HeatmapMetric("train/loss"),
)
"""Metrics of the heatmap, in the order of the page."""
_NAMES = frozenset(strip.name for strip in STRIPS)
PEAKS = ("memory/peak_allocated", "process/peak_rss")
NEWEST = (*_NAMES, *PEAKS)


@dataclass(slots=True)
class RecentRows:
    """Values of the last TAIL_ROWS rows of a rank by metric, oldest first."""

    step: int | None = None
    rows: dict[str, Floats] = field(default_factory=dict)

    def take(self, block: SeriesBlock) -> None:
        """Append newer rows."""
        if len(block):
            self.step = max(self.step or 0, int(np.nan_to_num(block.step[-1], posinf=0.0)))
        for row, key in enumerate(block.keys):
            if key in NEWEST:
                before = self.rows.get(key, np.empty(0))
                self.rows[key] = np.concatenate([before, block.mean[row]])[-TAIL_ROWS:]

    def mean(self, key: str) -> float | None:
        """Return the mean of the finite values; None without one."""
        values = self._finite(key)
        return float(values.mean()) if len(values) else None

    def last(self, key: str) -> float | None:
        """Return the newest finite value; None without one."""
        values = self._finite(key)
        return float(values[-1]) if len(values) else None

    def _finite(self, key: str) -> Floats:
        values = self.rows.get(key, np.empty(0))
        return values[np.isfinite(values)]


@dataclass(slots=True)
class _RankReader:
    """The row of a rank, and how far its store has been read."""

    row: int
    figures: RecentRows = field(default_factory=RecentRows)
    series: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """By series id, the last read one last: number of rows read, and the rows of its ranks."""
    visited: float = -np.inf
    member_at: float = -np.inf
    changed: tuple[int, ...] = ()
    complete: bool = False


class RankCache:
    """The ranks of one run. Callers hold `lock`."""

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = run.folder
        self.lock = threading.Lock()
        self.members: dict[int, RankEntry] = {}
        self.columns = _columns(1)  # by axis
        self.name = f"{time.time_ns():x}"[-8:]  # change numbers of another cache are invalid
        self._clock = clock
        self._created = run.created
        self._ranks: dict[int, _RankReader] = {}
        self.left_out = 0  # ranks with files that are not shown

    @property
    def numbers(self) -> list[int]:
        """Return the folder ranks in the order of the rows."""
        return list(self._ranks)

    @property
    def unlisted(self) -> list[int]:
        """Return the folder ranks whose files have not been read yet."""
        return [number for number in self._ranks if number not in self.members]

    @property
    def unread(self) -> int:
        """Return the number of ranks that have not been read yet."""
        return sum(not rank.complete for rank in self._ranks.values())

    def listed(self) -> list[RankEntry]:
        """Return the ranks in the order of the rows. Valid once `unlisted` is empty."""
        return [self.members[number] for number in self._ranks]

    def figures(self) -> list[RecentRows]:
        """Return the newest rows of each rank in the order of the rows."""
        return [rank.figures for rank in self._ranks.values()]

    def look(self, budget_s: float | None = None) -> None:
        """Read within the time budget, at least one series."""
        clock, core = self._clock() + MAX_WALL_S, time.thread_time()
        found = rank_numbers(self.folder)
        self.left_out = max(0, len(found) - MAX_RANKS_SHOWN)
        if found[:MAX_RANKS_SHOWN] != self.numbers:
            self._reset(found[:MAX_RANKS_SHOWN])
        usual_s = FIRST_BUDGET_S if self.unread else BUDGET_S
        core += usual_s if budget_s is None else budget_s

        def is_over() -> bool:
            return time.thread_time() >= core or self._clock() >= clock

        for number in self.unlisted:
            self._read_member(number)
            if is_over():
                return
        for number in sorted(self._ranks, key=self._turn):
            self._visit(number, is_over)
            if is_over():
                return

    def _reset(self, numbers: list[int]) -> None:
        """Read all ranks again after one was added: rows move. Only while a job starts."""
        self.columns = _columns(len(numbers))
        self.name = f"{time.time_ns():x}"[-8:]
        self._ranks = {number: _RankReader(row) for row, number in enumerate(numbers)}

    def _turn(self, number: int) -> tuple[bool, float]:
        rank = self._ranks[number]
        return rank.complete, rank.visited

    def _visit(self, number: int, is_over: Callable[[], bool]) -> None:
        rank, now = self._ranks[number], self._clock()
        if now - rank.member_at >= MEMBER_INTERVAL_S:
            rank.member_at = now
            self._read_member(number)
        rank.visited = now
        changed = _changed(self.folder / store_name(number))
        if changed == rank.changed and rank.complete:
            return
        try:
            with StoreReader(self.folder, number) as reader:
                has_all = self._read(reader, number, is_over)
        except StoreError as error:  # being created, or damaged
            log.debug("rank %d of %s: %s", number, self.folder.name, error)
            has_all = True
        if has_all:
            rank.complete, rank.changed = True, changed

    def _read_member(self, number: int) -> None:
        before = self.members.get(number)
        member = read_member(self.folder, number)
        if member is None:
            self.members[number] = before or unreadable(number)
            return
        self.members[number] = member
        if before is None or before.device != member.device:
            for rank in self._ranks.values():  # any rank may sample its GPU
                rank.changed = ()

    def _read(self, reader: StoreReader, number: int, is_over: Callable[[], bool]) -> bool:
        """Read the new rows of a store; return False if the budget ended before the last series."""
        rank = self._ranks[number]
        # The longest unread first: the budget may end before the last series at every visit.
        waited = {id_: place for place, id_ in enumerate(rank.series)}
        found = sorted(reader.series(), key=lambda info: waited.get(info.id, -1))
        for info in found:
            targets = list(self._targets(info, number))
            rows = [target.row for target in targets]
            seen, before = rank.series.pop(info.id, (0, rows))
            if before != rows or info.rows - seen > MAX_NEW_ROWS:
                seen = 0
            rank.series[info.id] = info.rows, rows
            if not rows or seen == info.rows:
                continue
            if info.rows - seen <= MAX_NEW_ROWS:
                block = newest = reader.read(info.id, seen, info.rows, 1)
            else:
                block = reader.read(info.id, 0, info.rows, overview_bucket(info.rows))
                newest = reader.read(info.id, max(0, info.rows - TAIL_ROWS), info.rows, 1)
            for target in targets:
                self._take(target, block, newest, afresh=seen == 0)
            if is_over() and info is not found[-1]:
                return False
        return True

    def _take(
        self, rank: _RankReader, block: SeriesBlock, newest: SeriesBlock, *, afresh: bool
    ) -> None:
        drawn = {key: row for row, key in enumerate(block.keys) if key in _NAMES}
        values = {
            key: (block.mean[row], block.high[row], block.count[row]) for key, row in drawn.items()
        }
        for axis, xs in (("time", block.ts - self._created), ("step", block.step)):
            if afresh:
                self.columns[axis].clear(rank.row, drawn)
            self.columns[axis].add(rank.row, xs, values)
        rank.figures.take(newest)

    def _targets(self, info: SeriesInfo, number: int) -> Iterator[_RankReader]:
        """Yield the ranks of a series; a GPU's series belongs to the ranks that train on it."""
        if info.stream != Stream.DEVICES:
            yield self._ranks[number]
            return
        host = self.members[number].host if number in self.members else None
        for other, member in self.members.items():
            if member.host == host and member.device == info.source and other in self._ranks:
                yield self._ranks[other]


def _columns(ranks: int) -> dict[str, TimeGrid]:
    return {axis: TimeGrid(STRIPS, ranks, width) for axis, width in FIRST_WIDTHS.items()}


def overview_bucket(rows: int) -> int:
    """Return the rows per bucket of a rollup level with at least COLUMNS / 2 buckets."""
    bucket = 1
    while rows // (bucket * FACTOR) >= COLUMNS // 2:
        bucket *= FACTOR
    return bucket


def _changed(path: Path) -> tuple[int, ...]:
    """Return sizes and modification times of a store's two files."""
    found = []
    for name in (path, path.with_name(f"{path.name}-wal")):
        try:
            stat = os.stat(name)
            found += [stat.st_mtime_ns, stat.st_size]
        except OSError:
            found.append(0)
    return tuple(found)
