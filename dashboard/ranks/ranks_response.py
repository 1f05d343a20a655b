"""An answer to a tab that shows the ranks of a job, as JSON-able values of at most LIMIT bytes.

`dashboard/live_chart/ranks_data.js` is the other end. What names the ranks is sent once; of the
strips only what changed; the figures of the table in as few digits as it shows.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dashboard.charts.run_view import world_size_of
from dashboard.ranks.members import MOST, RankEntry, places
from dashboard.ranks.rank_cache import RankCache, RecentRows
from dashboard.ranks.time_grid import FIRST_WIDTHS, packed
from stepscope.distributed.hangs.job_state import Hang
from stepscope.distributed.stragglers.detect import StragglerVerdict
from stepscope.run import RunInfo, RunStatus
from stepscope.run.rank_info import RankMetadata, now_of
from stepscope.run.rank_status import missing_ranks

Json = dict[str, Any]

LIMIT = 4_800  # Bytes of an answer.
BYTES_A_VALUE = 2.8  # A half float in base64, and the number of its column shared by a few ranks.
ENDS = 8  # Ranks that ended of which an answer says when and why; the others by their letter alone.
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
    """What a tab has: the metric that it shows, the columns up to a change, the names of ranks.

    `columns` and `who` are as the server named them, "" for none. `only_strips`: it asks again
    for columns alone, at once after an answer that could not hold them all. `axis` is that of the
    columns, "time" or "step".
    """

    metric: str = ""
    columns: str = ""
    seen: int = 0
    who: str = ""
    only_strips: bool = False
    axis: str = "time"


def answer(job: RankCache, run: RunInfo, question: RanksRequest, said: Json) -> Json:
    """Return the answer with what is `said` of the ranks; who calls this holds the job's lock."""
    shown: Json = {"run": run.id, "live": run.status.live, "now": _now(run)}
    if job.unread:  # soon told: as many more questions at once, and nothing is sent twice
        return shown | {"unread": job.unread, "more": True}
    shown |= _who(job, run, question)
    if "ranks" not in shown and not question.only_strips:
        shown |= _table(job) | _state(job, run) | said
    shown |= {"unread": 0, "metrics": job.columns[question.axis].recorded()}
    return shown | _strips(job, question, LIMIT - len(json.dumps(shown, separators=(",", ":"))))


def _now(run: RunInfo) -> float:
    until = None if run.status.live else run.ended
    seconds = (until if until is not None else now_of(run.run_json)) - run.created
    return round(seconds, 1) if math.isfinite(seconds) else 0.0


def _who(job: RankCache, run: RunInfo, question: RanksRequest) -> Json:
    """Return the ranks' names where the tab has others, else only the version of the names."""
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
    """Return torch's numbers of the ranks without a file, by how they stand; of each at most MOST.

    A job with more ranks than are listed has files for those as well: nothing is said of them.
    """
    if size > MOST:
        return {}
    file = RankMetadata(0, run.run_json, run.status, 0.0, 0.0)
    here = {member.rank for member in members}
    found: dict[str, list[int]] = {}
    for rank, standing in missing_ranks(
        file, here, ended=not run.status.live, now=now_of(run.run_json)
    ).items():
        found.setdefault(standing.state.value, []).append(rank)
    return found


def _table(job: RankCache) -> Json:
    """Return the figures of the table, a list each, in the order of the ranks."""
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
    # Those that went wrong first: of a finished job nobody asks when each rank ended.
    ended.sort(key=lambda each: (each[1].status is RunStatus.FINISHED, each[1].ended or 0.0))
    return {
        "state": "".join(LETTERS[member.status] for member in members),
        "ends": [_end(row, member, run.created) for row, member in ended[:ENDS]],
    }


def _end(row: int, member: RankEntry, created: float) -> list[Any]:
    seconds = (member.ended or math.nan) - created
    return [row, round(seconds, 1) if math.isfinite(seconds) else None, member.reason]


def _strips(job: RankCache, question: RanksRequest, room: int) -> Json:
    columns = job.columns[question.axis]
    recorded = columns.recorded()
    metric = question.metric if question.metric in recorded else next(iter(recorded), None)
    named = f"{job.name}-{columns.generation}-{metric}-{question.axis}"
    found: Json = {"columns": named, "width": columns.width, "metric": metric}
    if metric is None:
        return found | {"seen": 0, "more": False}
    same = question.columns == named
    limit = int((room - 200) / (BYTES_A_VALUE * columns.ranks + 4))
    at, seen, waits = columns.since(metric, question.seen if same else 0, limit)
    strip = {"at": at.tolist()} | packed(columns.values(metric, at))
    return found | {"strip": strip, "seen": seen, "more": waits}


def _share(figures: RecentRows, key: str) -> float | None:
    """Return a metric in percent of the step time, both over the same newest rows."""
    part, whole = figures.mean(key), figures.mean("perf/step_time")
    if part is None or not whole or whole < 0:
        return None
    return min(100.0, max(0.0, 100.0 * part / whole))


def _mib(size: float | None) -> float | None:
    return None if size is None else size / MIB


def _short(value: float | None) -> float | None:
    """Return a value at four digits: what the table shows."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def parse_question(query: Iterable[tuple[str, str]]) -> RanksRequest:
    """Return the question in a query. Raises ValueError for anything else."""
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


TEXT_LENGTH = 400
NEXT_LENGTH = 300
NAMED = 16


def rank_verdict(found: StragglerVerdict | None, hang: Hang | None) -> dict[str, Any] | None:
    """Return `kind`, `ranks`, `phase`, `share` (0 to 1), `text` and `next` of a verdict.

    A hang comes first: what was slow before it does not matter then. The kind "none" names nobody
    and its text says why. None before the first look.
    """
    if hang is not None:
        return _said("hang", hang.ranks, hang.phase, None, hang.text, hang.next)
    if found is None:
        return None
    kind, phase = found.kind.value, found.phase.value if found.phase is not None else None
    return _said(kind, found.ranks, phase, found.share, found.text, found.next)


def _said(
    kind: str,
    ranks: tuple[int, ...],
    phase: str | None,
    share: float | None,
    text: str,
    step: str | None,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "ranks": list(ranks[:NAMED]),
        "phase": phase,
        "share": None if share is None else round(share, 3),
        "text": text[:TEXT_LENGTH],
        "next": None if step is None else step[:NEXT_LENGTH],
    }
