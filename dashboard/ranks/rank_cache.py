"""What a server keeps of one job for all tabs that show its ranks: a few hundred kB.

Each question reads a little: as many ranks as fit into a few milliseconds, those that have waited
longest first. So an answer takes as long for 64 ranks as for two; a rank of 64 is read every few
seconds. Of a long run the first reading takes the store's rollups, later ones only new rows.
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

from dashboard.ranks.members import MOST, RankEntry, read_member, unreadable
from dashboard.ranks.time_grid import COLUMNS, FIRST_WIDTHS, HeatmapMetric, TimeGrid
from stepscope.metrics import Stream
from stepscope.run import RunInfo
from stepscope.run.rank_info import rank_numbers
from stepscope.store import SeriesBlock, SeriesInfo, StoreError, StoreReader, store_name
from stepscope.store.blocks import FACTOR, Floats

log = logging.getLogger(__name__)

BUDGET_S = 0.004
"""Time of a core that a question may spend on reading; a series that is begun is finished."""
FIRST_BUDGET_S = 0.006
"""The same while ranks have not been read at all: nothing else is answered then."""
LONGEST_S = 0.03  # Time on the clock that it may take, where a disk or a busy machine is slow.
MEMBER_S = 2.0  # How often the file of a rank is read again.
TAIL = 128  # Newest rows that the table's figures are of.
MOST_ROWS = 2048
"""New rows that are read one by one; more are read as an overview of the whole run."""
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
"""What the strips can show, in the order of the page."""
_NAMES = frozenset(strip.name for strip in STRIPS)
PEAKS = ("memory/peak_allocated", "process/peak_rss")
NEWEST = (*_NAMES, *PEAKS)


@dataclass(slots=True)
class RecentRows:
    """The newest rows of a rank: per metric the values of the last TAIL rows, oldest first."""

    step: int | None = None
    rows: dict[str, Floats] = field(default_factory=dict)

    def take(self, block: SeriesBlock) -> None:
        """Add rows that are newer than all before."""
        if len(block):
            self.step = max(self.step or 0, int(np.nan_to_num(block.step[-1], posinf=0.0)))
        for row, key in enumerate(block.keys):
            if key in NEWEST:
                before = self.rows.get(key, np.empty(0))
                self.rows[key] = np.concatenate([before, block.mean[row]])[-TAIL:]

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
    """One rank: its place among the rows, and how far its store has been read."""

    row: int
    figures: RecentRows = field(default_factory=RecentRows)
    series: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """By the number of a series: how many of its rows were read, and for which ranks. The one that
    was read last stands last."""
    visited: float = -np.inf
    member_at: float = -np.inf
    changed: tuple[int, ...] = ()
    complete: bool = False


class RankCache:
    """The ranks of one run; `lock` is held by whoever calls anything of it."""

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = run.folder
        self.lock = threading.Lock()
        self.members: dict[int, RankEntry] = {}
        self.columns = _columns(1)
        """By the name of their axis."""
        self.name = f"{time.time_ns():x}"[-8:]
        """Of this cache: numbers of changes from another one mean nothing here."""
        self._clock = clock
        self._created = run.created
        self._ranks: dict[int, _RankReader] = {}
        self.left_out = 0
        """Ranks that have files here and are not shown."""

    @property
    def numbers(self) -> list[int]:
        """Return the ranks' numbers in the order of the rows."""
        return list(self._ranks)

    @property
    def unmet(self) -> list[int]:
        """Return the numbers of the ranks whose files have not been looked at yet."""
        return [number for number in self._ranks if number not in self.members]

    @property
    def unread(self) -> int:
        """Return how many ranks have not been read yet."""
        return sum(not rank.complete for rank in self._ranks.values())

    def listed(self) -> list[RankEntry]:
        """Return the ranks in the order of the rows; once none is unmet."""
        return [self.members[number] for number in self._ranks]

    def figures(self) -> list[RecentRows]:
        """Return the newest rows of each rank, in the same order."""
        return [rank.figures for rank in self._ranks.values()]

    def look(self, budget_s: float | None = None) -> None:
        """Read what fits into the time, at least one series."""
        clock, core = self._clock() + LONGEST_S, time.thread_time()
        self._list()
        usual_s = FIRST_BUDGET_S if self.unread else BUDGET_S
        core += usual_s if budget_s is None else budget_s

        def is_over() -> bool:
            return time.thread_time() >= core or self._clock() >= clock

        for number in self.unmet:
            self._meet(number)
            if is_over():
                return
        for number in sorted(self._ranks, key=self._turn):
            self._visit(number, is_over)
            if is_over():
                return

    def _list(self) -> None:
        found = rank_numbers(self.folder)
        self.left_out = max(0, len(found) - MOST)
        shown = found[:MOST]
        if shown != self.numbers:  # a rank has come: rows move
            self._begin_anew(shown)

    def _begin_anew(self, numbers: list[int]) -> None:
        """Have all read again. This happens while a job starts, so there is little to read."""
        self.columns = _columns(len(numbers))
        self.name = f"{time.time_ns():x}"[-8:]
        self._ranks = {number: _RankReader(row) for row, number in enumerate(numbers)}

    def _turn(self, number: int) -> tuple[bool, float]:
        rank = self._ranks[number]
        return rank.complete, rank.visited

    def _visit(self, number: int, is_over: Callable[[], bool]) -> None:
        rank, now = self._ranks[number], self._clock()
        if now - rank.member_at >= MEMBER_S:
            rank.member_at = now
            self._meet(number)
        rank.visited = now
        changed = _changed(self.folder / store_name(number))
        if changed == rank.changed and rank.complete:
            return
        try:
            with StoreReader(self.folder, number) as reader:
                has_all = self._read(reader, number, is_over)
        except StoreError as error:  # being made, or broken: the others are shown all the same
            log.debug("rank %d of %s: %s", number, self.folder.name, error)
            has_all = True
        if has_all:
            rank.complete, rank.changed = True, changed

    def _meet(self, number: int) -> None:
        before = self.members.get(number)
        member = read_member(self.folder, number)
        if member is None:
            self.members[number] = before or unreadable(number)
            return
        self.members[number] = member
        if before is None or before.device != member.device:
            for rank in self._ranks.values():  # which may sample its GPU
                rank.changed = ()

    def _read(self, reader: StoreReader, number: int, is_over: Callable[[], bool]) -> bool:
        """Read what is new in the series of a store; return False where time was up before all."""
        rank = self._ranks[number]
        # Those that waited longest first: time may be up before the last one at every visit.
        waited = {id_: place for place, id_ in enumerate(rank.series)}
        found = sorted(reader.series(), key=lambda info: waited.get(info.id, -1))
        for info in found:
            targets = list(self._targets(info, number))
            rows = [target.row for target in targets]
            seen, before = rank.series.pop(info.id, (0, rows))
            if before != rows or info.rows - seen > MOST_ROWS:
                seen = 0
            rank.series[info.id] = info.rows, rows
            if not rows or seen == info.rows:
                continue
            if info.rows - seen <= MOST_ROWS:
                block = newest = reader.read(info.id, seen, info.rows, 1)
            else:
                block = reader.read(info.id, 0, info.rows, overview_bucket(info.rows))
                newest = reader.read(info.id, max(0, info.rows - TAIL), info.rows, 1)
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
        """Give the ranks that a series is of: a GPU's is of those that train on it."""
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
    """Return the rows of a bucket for a first reading: a whole level of the store's rollups, and
    at least as many buckets as columns are always in use."""
    bucket = 1
    while rows // (bucket * FACTOR) >= COLUMNS // 2:
        bucket *= FACTOR
    return bucket


def _changed(path: Path) -> tuple[int, ...]:
    """Return what changes when the store is written: sizes and times of its two files."""
    found = []
    for name in (path, path.with_name(f"{path.name}-wal")):
        try:
            stat = os.stat(name)
            found += [stat.st_mtime_ns, stat.st_size]
        except OSError:
            found.append(0)
    return tuple(found)
