"""Answers of `/api/ranks` as JSON values of at most MAX_BYTES bytes.

`dashboard/live_chart/ranks_data.js` is the client. The names of the ranks are sent once, of the
heatmap only changed columns, and table values with the digits that the table shows.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dashboard.charts.run_view import world_size_of
from dashboard.ranks.members import MAX_RANKS_SHOWN, RankEntry, places
from dashboard.ranks.rank_cache import RankCache, RecentRows
from dashboard.ranks.time_grid import FIRST_WIDTHS, packed
from stepscope.distributed.hangs.job_state import Hang
from stepscope.distributed.stragglers.detect import StragglerVerdict
from stepscope.run import RunInfo, RunStatus
from stepscope.run.rank_info import RankMetadata, now_of
from stepscope.run.rank_status import missing_ranks

Json = dict[str, Any]

MAX_BYTES = 4_800
BYTES_PER_VALUE = 2.8  # a half float in base64, and its share of the column's number
MAX_ENDS = 8  # ended ranks sent with time and reason; the others with their state letter only
MIB = 2**20
LETTERS = {
    RunStatus.PENDING: "p",
    RunStatus.RUNNING: "a",
    RunStatus.PAUSED: "a",
    RunStatus.FINISHED: "f",
    RunStatus.STOPPED: "s",
    RunStatus.FAILED: "x",
    RunStatus.CRASHED: "c",
}


@dataclass(frozen=True, slots=True)
class RanksRequest:
    """The state of a tab: its metric, the columns up to change `seen`, the names of the ranks.

    `columns` and `who` are versions given by the server, "" for none. `only_strips`: send only
    columns, after an answer that could not hold all of them. `axis`: "time" or "step".
    """

    metric: str = ""
    columns: str = ""
    seen: int = 0
    who: str = ""
    only_strips: bool = False
    axis: str = "time"


def answer(job: RankCache, run: RunInfo, question: RanksRequest, verdict: Json) -> Json:
    """Return the answer, with `verdict` if it has a table. The caller holds the job's lock."""
    shown: Json = {"run": run.id, "live": run.status.live, "now": _now(run)}
    if job.unread:  # the client repeats the request at once
        return shown | {"unread": job.unread, "more": True}
    shown |= _who(job, run, question)
    if "ranks" not in shown and not question.only_strips:
        shown |= _table(job) | _state(job, run) | verdict
    shown |= {"unread": 0, "metrics": job.columns[question.axis].recorded()}
    return shown | _strips(job, question, MAX_BYTES - len(json.dumps(shown, separators=(",", ":"))))


def _now(run: RunInfo) -> float:
    until = None if run.status.live else run.ended
    seconds = (until if until is not None else now_of(run.run_json)) - run.created
    return round(seconds, 1) if math.isfinite(seconds) else 0.0


def _who(job: RankCache, run: RunInfo, question: RanksRequest) -> Json:
    """Return the version of the ranks' names, and the names if the tab has another version."""
    members = job.listed()
    hosts = list(dict.fromkeys(member.host for member in members))
    size = world_size_of(run.run_json)
    named = {
        "hosts": hosts,
        "ranks": [
            [member.number, member.rank, hosts.index(member.host), place]
            for member, place in zip(members, places(members), strict=True)
        ],
        "world_size": size,
        "missing": _missing(members, run, size),
        "left_out": job.left_out,
    }
    version = f"{zlib.crc32(repr(named).encode()):x}"
    return {"who": version} | ({} if version == question.who else named)


def _missing(members: list[RankEntry], run: RunInfo, size: int) -> Json:
    """Return the global ranks without a file by state; {} for jobs with more ranks than shown."""
    if size > MAX_RANKS_SHOWN:
        return {}
    file = RankMetadata(0, run.run_json, run.status, 0.0, 0.0)
    present = {member.rank for member in members}
    found: dict[str, list[int]] = {}
    for rank, standing in missing_ranks(
        file, present, ended=not run.status.live, now=now_of(run.run_json)
    ).items():
        found.setdefault(standing.state.value, []).append(rank)
    return found


def _table(job: RankCache) -> Json:
    """Return the columns of the table, each in the order of the ranks."""
    figures = job.figures()
    on_gpu = any(each.last("memory/allocated") is not None for each in figures)
    memory, peak = (
        ("memory/allocated", "memory/peak_allocated")
        if on_gpu
        else ("process/rss", "process/peak_rss")
    )

    def column(value: Callable[[RecentRows], float | None]) -> list[float | None]:
        return [_short(value(each)) for each in figures]

    return {
        "table": {
            "step": [each.step for each in figures],
            "time": column(lambda each: each.mean("perf/step_time")),
            "wait": column(lambda each: _share(each, "perf/comm_wait")),
            "data": column(lambda each: _share(each, "perf/data_wait")),
            "memory": column(lambda each: _mib(each.last(memory))),
            "peak": column(lambda each: _mib(each.last(peak))),
        },
        "memory": "allocated" if on_gpu else "process",
    }


def _state(job: RankCache, run: RunInfo) -> Json:
    members = job.listed()
    ended = [(row, member) for row, member in enumerate(members) if not member.status.live]
    # Failed ranks first.
    ended.sort(key=lambda each: (each[1].status is RunStatus.FINISHED, each[1].ended or 0.0))
    return {
        "state": "".join(LETTERS[member.status] for member in members),
        "ends": [_end(row, member, run.created) for row, member in ended[:MAX_ENDS]],
    }


def _end(row: int, member: RankEntry, created: float) -> list[Any]:
    seconds = (member.ended or math.nan) - created
    return [row, round(seconds, 1) if math.isfinite(seconds) else None, member.reason]


def _strips(job: RankCache, question: RanksRequest, max_bytes: int) -> Json:
    columns = job.columns[question.axis]
    recorded = columns.recorded()
    metric = question.metric if question.metric in recorded else next(iter(recorded), None)
    named = f"{job.name}-{columns.generation}-{metric}-{question.axis}"
    found: Json = {"columns": named, "width": columns.width, "metric": metric}
    if metric is None:
        return found | {"seen": 0, "more": False}
    same = question.columns == named
    limit = int((max_bytes - 200) / (BYTES_PER_VALUE * columns.ranks + 4))
    at, seen, waits = columns.since(metric, question.seen if same else 0, limit)
    strip = {"at": at.tolist()} | packed(columns.values(metric, at))
    return found | {"strip": strip, "seen": seen, "more": waits}


def _share(figures: RecentRows, key: str) -> float | None:
    """Return a metric in percent of the step time over the newest rows."""
    part, whole = figures.mean(key), figures.mean("perf/step_time")
    if part is None or not whole or whole < 0:
        return None
    return min(100.0, max(0.0, 100.0 * part / whole))


def _mib(size: float | None) -> float | None:
    return None if size is None else size / MIB


def _short(value: float | None) -> float | None:
    """Return a value with four digits, as the table shows it."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def parse_question(query: Iterable[tuple[str, str]]) -> RanksRequest:
    """Return the request in a query. Raises ValueError if it is malformed."""
    given = dict(query)
    seen = given.get("seen", "0")
    if not seen.isdecimal() or len(seen) > 15:
        raise ValueError(f"seen: must be a number of a change, got {seen[:40]!r}.")
    axis = given.get("axis", "time")
    if axis not in FIRST_WIDTHS:
        raise ValueError(f"axis: must be time or step, got {axis[:40]!r}.")
    return RanksRequest(
        metric=given.get("metric", "")[:100],
        columns=given.get("columns", "")[:100],
        seen=int(seen),
        who=given.get("who", "")[:20],
        only_strips=bool(given.get("only_strips")),
        axis=axis,
    )


MAX_TEXT_CHARS = 400
MAX_NEXT_CHARS = 300
MAX_NAMED_RANKS = 16


def rank_verdict(straggler: StragglerVerdict | None, hang: Hang | None) -> Json | None:
    """Return `kind`, `ranks`, `phase`, `share` (0 to 1), `text` and `next` of a verdict.

    A hang hides a straggler. The kind "none" has no ranks; its text is the reason. Returns None
    before the first analysis.
    """
    found = hang or straggler
    if found is None:
        return None
    share = None if isinstance(found, Hang) else found.share
    return {
        "kind": "hang" if isinstance(found, Hang) else found.kind.value,
        "ranks": list(found.ranks[:MAX_NAMED_RANKS]),
        "phase": None if found.phase is None else str(found.phase),
        "share": None if share is None else round(share, 3),
        "text": found.text[:MAX_TEXT_CHARS],
        "next": None if found.next is None else found.next[:MAX_NEXT_CHARS],
    }
