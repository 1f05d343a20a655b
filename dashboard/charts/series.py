"""Answers of `/api/series` and `/api/window` as JSON values: new points at a fitting resolution.

A client holds at most TARGET buckets of each series and sends a cursor of the rows that it has. The
size of an answer does not depend on the length of the run. `dashboard/live_chart` is the client.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dashboard.charts.chart_spec import COLORS
from dashboard.charts.run_view import (
    custom_metrics,
    loss_keys,
    norm_keys,
    optimizer_names,
    rate_keys,
    run_kind,
)
from stepscope.common.formatting import number_name
from stepscope.recorder.cuda_readback import SLOTS
from stepscope.recorder.rows import RATE, STEP_TIME
from stepscope.run import RunInfo, RunKind, RunStatus
from stepscope.run.rank_info import now_of
from stepscope.store import EventRow, SeriesBlock, SeriesInfo, StoreReader
from stepscope.store.reader import Axis

TARGET = 500  # buckets of a chart, at most
MAX_NEW = 250  # new buckets; with more, a fresh overview is smaller
MAX_EVENTS = 1000  # newest events of a first answer: epochs must not crowd out commands
RECENT_ROWS = 24  # searched for the newest value: 2.4 s of samples, more than the slowest tier
RATE_S = 1.0  # the rate is averaged over it: a single step may be an epoch's short last batch
MAX_RATE_ROWS = 512  # read for the rate: two frames of the store
STALE_S = 3.0  # age of the heartbeat from which the page warns; it is written every second
ROUND_S = 5  # resolution of a wait in a message: screen readers announce each change
MAX_NAMED_RANKS = 8
FOLDED = {
    *("train/amp_scale", "train/amp_skipped"),
    *("perf/tokens_per_sec", "perf/tflops", "perf/mfu"),
    *("gpu/temp", "gpu/power_limit"),
    *("comm/bytes", "comm/rate", "comm/time", "comm/share", "comm/bus_bandwidth"),
}
"""Metrics of folded charts, like learning rates and gradient norms: sent only while open."""
LIVE_KEYS = COLORS.keys() - FOLDED - {"train/lr", "train/grad_norm"} | {
    *("val/accuracy", "sampler/cost")
}
"""Metrics of charts and tiles, sent with every poll."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The metrics sent to a client: lines (`drawn`) and newest values (`last`)."""

    drawn: frozenset[str]
    last: frozenset[str]


@dataclass(frozen=True, slots=True)
class SeriesCursor:
    """A client's state of a series: it has `row` rows in buckets of `bucket` rows."""

    row: int
    bucket: int


def keys_of(run: RunInfo, include_folded: bool) -> Keys:
    """Return the metrics to send; those of folded charts only on request."""
    include_folded |= run_kind(run) is RunKind.RECORD  # a recording folds nothing
    optimizers = len(optimizer_names(run.run_json))
    return _keys(custom_metrics(run.run_json)[0], optimizers, include_folded)


@functools.lru_cache(maxsize=64)
def _keys(custom: tuple[str, ...], optimizers: int, include_folded: bool) -> Keys:
    rates = (key for key, _, _ in rate_keys(optimizers))
    folded = {*FOLDED, *norm_keys(optimizers), *rates}
    drawn = {*LIVE_KEYS, *custom, *loss_keys(optimizers), *(folded if include_folded else ())}
    return Keys(frozenset(drawn), frozenset({*drawn, *folded, "train/epoch"}))


def parse_cursors(text: str) -> dict[str, SeriesCursor]:
    """Return the cursors in `SERIES~ROW~BUCKET,…`. Raises ValueError for anything else."""
    cursors = {}
    for part in filter(None, text.split(",")):
        fields = part.split("~")
        if len(fields) != 3 or not (fields[1] + fields[2]).isdecimal() or len(part) > 200:
            raise ValueError(f"since: must be SERIES~ROW~BUCKET,…, got {part[:80]!r}.")
        row, bucket = int(fields[1]), int(fields[2])
        if bucket < 1 or bucket & (bucket - 1) or bucket > 2**40:
            raise ValueError(f"since: BUCKET must be a power of two, got {bucket}.")
        cursors[fields[0]] = SeriesCursor(row, bucket)
    return cursors


def fitting_bucket(rows: int) -> int:
    """Return the smallest power of two that puts `rows` rows into at most TARGET buckets."""
    return 1 << max(0, math.ceil(math.log2(rows / TARGET))) if rows > TARGET else 1


def span(rows: int, cursor: SeriesCursor | None) -> tuple[int, int, int, bool]:
    """Return start, stop and bucket of the rows to send; True if they replace all earlier rows.

    The rows after the cursor, or an overview if that is smaller.
    """
    natural = fitting_bucket(rows)
    if cursor is not None and cursor.row <= rows:
        bucket = max(cursor.bucket, natural)
        start = rows if cursor.row == rows else cursor.row - cursor.row % bucket
        if rows - start <= MAX_NEW * bucket:
            return start, rows, bucket, False
    return 0, rows, natural, True


def update(
    reader: StoreReader,
    run: RunInfo,
    cursors: Mapping[str, SeriesCursor],
    after_event: int,
    include_folded: bool = False,
) -> dict[str, Any]:
    """Return the run's state, the rows after the cursors and the events after `after_event`."""
    part = _SeriesResponse(reader, run.created, keys_of(run, include_folded))
    series = {
        _name(info): {**part.delta(info, cursors.get(_name(info))), **part.newest(info)}
        for info in reader.series()
    }
    answer = {**state(run), "series": series, "events": events(reader, run, after_event)}
    if "steps" in series:
        # The rows are newer than run.json, which is rewritten once a second.
        newest = {
            "step": series["steps"]["last"].pop("step", None),  # None: damaged frames
            "epoch": series["steps"]["last"].pop("train/epoch", None),
        }
        answer["progress"] |= {name: value for name, value in newest.items() if value is not None}
    return answer


def state(run: RunInfo) -> dict[str, Any]:
    """Return the state of a run: the part of an answer that needs no store."""
    run_json = run.run_json
    progress = {
        name: run_json.get(name)
        for name in ("step", "total_steps", "epoch", "epochs", "first_step", "paused_s")
    }
    progress["epoch"] = progress["epoch"] or None  # counted from 1; 0: not counted
    if run_kind(run) is RunKind.RECORD:
        progress["step"] = None  # a recording has no steps
    return {
        "run": run.id,
        "status": run.status,
        "reason": run.reason or _waiting(run),
        "warnings": warnings(run),
        "t0": run.created,
        "now": round((run.ended or now_of(run.run_json)) - run.created, 3),
        "progress": progress,
        "series": {},
        "events": [],
    }


def warnings(run: RunInfo) -> list[str]:
    """Return the warnings about the recording itself, one sentence each."""
    run_json, age_s = run.run_json, run.heartbeat_age_s
    found = [str(run_json["problem"])] if run_json.get("problem") else []
    late, dropped = run_json.get("dropped_values"), run_json.get("dropped")
    if isinstance(late, int) and late > 0:
        step = "step lacks" if late == 1 else "steps lack"
        found.append(
            f"{late:,} {step} GPU values such as the loss: the copy was refused, failed, or "
            f"more than {SLOTS:,} were in flight. Training was not delayed."
        )
    if isinstance(dropped, int) and dropped > 0:
        were = "step or event was" if dropped == 1 else "steps or events were"
        found.append(
            f"{dropped:,} {were} not recorded: the disk was too slow and the memory buffer is "
            "full, or the store cannot hold them. Training was not delayed."
        )
    waits = command_wait(run, now_of(run.run_json))
    if waits is not None:
        found.append(waits)
    if run.status.live and age_s > STALE_S:
        found.append(
            f"No update for {_duration(age_s)}. The run has not ended, but its folder does not "
            "change: the disk may be full or read-only, or the process blocked. Values may be "
            "stale."
        )
    return found


def command_wait(run: RunInfo, now: float) -> str | None:
    """Return which ranks have not reached the step of a command; None if all have."""
    waits = run.run_json.get("command_waits")
    if not run.status.live or not isinstance(waits, dict):
        return None
    try:
        label = str(waits["name"]).replace("_", " ").capitalize()
        since, step, ranks = float(waits["since"]), int(waits["step"]), list(waits["ranks"])
    except (KeyError, TypeError, ValueError):
        return None
    waited_s = max(ROUND_S, int(now - since) // ROUND_S * ROUND_S)
    if len(ranks) == run.run_json.get("world_size"):
        late = "no rank has"
    else:
        names = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
        names += ", …" if len(ranks) > MAX_NAMED_RANKS else ""
        late = f"rank {names} has not" if len(ranks) == 1 else f"ranks {names} have not"
    return f"{label} is waiting for step {step:,}: {late} arrived after {waited_s:,} s."


def _waiting(run: RunInfo) -> str | None:
    if run.status is RunStatus.PENDING and run_kind(run) in (RunKind.WATCH, RunKind.INIT):
        return "The script has not finished its first optimizer step yet."
    return None


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min"


def window(
    reader: StoreReader,
    run: RunInfo,
    axis: Axis,
    low: float,
    high: float,
    include_folded: bool = False,
) -> dict[str, Any]:
    """Return every series between two steps, or two times in seconds since the run's start."""
    if axis == "time":
        low, high = low + run.created, high + run.created
    part = _SeriesResponse(reader, run.created, keys_of(run, include_folded))
    found = {}
    for info in reader.series():
        start, stop = reader.rows_between(info.id, axis, low, high)
        # One more row on either side: lines reach the edges of the chart.
        start, stop = max(0, start - 1), min(info.rows, stop + 1)
        found[_name(info)] = part.rows(info, start, stop, fitting_bucket(stop - start))
    return {"run": run.id, "series": found}


def events(reader: StoreReader, run: RunInfo, after: int) -> list[dict[str, Any]]:
    """Return the newest events after an id, the oldest first."""
    return [_event(event, run.created) for event in reader.events(after, MAX_EVENTS)]


def rank_events(rows: Iterable[tuple[int, EventRow]], run: RunInfo) -> list[dict[str, Any]]:
    """Return events of other ranks; their ids are text that contains the rank."""
    return [_event(event, run.created) | {"id": f"rank{rank}-{event.id}"} for rank, event in rows]


@dataclass(frozen=True, slots=True)
class _SeriesResponse:
    """The shared inputs of all series of one answer."""

    reader: StoreReader
    created: float
    keys: Keys

    def delta(self, info: SeriesInfo, cursor: SeriesCursor | None) -> dict[str, Any]:
        """Return the rows after a cursor, or an overview if that is smaller."""
        start, stop, bucket, reset = span(info.rows, cursor)
        return {**self.rows(info, start, stop, bucket), "reset": reset}

    def newest(self, info: SeriesInfo) -> dict[str, Any]:
        """Return `last`, the newest value of each metric in the last RECENT_ROWS rows.

        `since` holds for each value that is not finite the step of the first one after the last
        finite value.
        """
        block = self.reader.read(info.id, max(0, info.rows - RECENT_ROWS), info.rows, 1)
        last: dict[str, float | int | str | None] = {}
        since: dict[str, int] = {}
        for key, value in _newest_values(block).items():
            if key not in self.keys.last:
                continue
            if math.isfinite(value):
                last[key] = _number(value)
            else:
                last[key] = number_name(value)
                since[key] = self._odd_since(info, key)
        if info.stream == "steps" and len(block):
            last["step"] = int(block.step[-1])
            if RATE in last and RATE not in since:
                last.update(_last_second(self._until_last_second(info, block)))
        return {"last": last, "since": since}

    def _until_last_second(self, info: SeriesInfo, block: SeriesBlock) -> SeriesBlock:
        """Return the newest rows back to RATE_S before the last timed row."""
        rows = len(block)
        while rows < min(MAX_RATE_ROWS, info.rows):
            timed = np.flatnonzero(np.isfinite(block.mean[block.keys.index(RATE)]))
            if len(timed) and block.ts[0] <= block.ts[timed[-1]] - RATE_S:
                break
            rows = min(4 * rows, MAX_RATE_ROWS)
            block = self.reader.read(info.id, max(0, info.rows - rows), info.rows, 1)
        return block

    def _odd_since(self, info: SeriesInfo, key: str) -> int:
        """Return the step of the first value after the last finite one."""
        finite = self._find(info, key, "count", 0, info.rows, newest=True)
        start = 0 if finite is None else finite + 1
        first = self._find(info, key, "odd", start, info.rows, newest=False)
        at = info.rows - 1 if first is None else first
        return int(self.reader.read(info.id, at, at + 1, 1).step[0])

    def _find(
        self, info: SeriesInfo, key: str, what: str, start: int, stop: int, *, newest: bool
    ) -> int | None:
        """Return the newest or the first row from start to stop with a nonzero `what` of a metric.

        Searches TARGET buckets, then inside the match: three reads for ten million rows.
        """
        bucket = fitting_bucket(stop - start)
        block = self.reader.read(info.id, start, stop, bucket)
        if key not in block.keys:
            return None
        # The first bucket may begin before `start`, and its match may lie there.
        begin = start - start % bucket
        have = np.flatnonzero(getattr(block, what)[block.keys.index(key)]).tolist()
        for place in reversed(have) if newest else have:
            low = max(start, begin + place * bucket)
            if bucket == 1:
                return low
            high = min(stop, begin + (place + 1) * bucket)
            found = self._find(info, key, what, low, high, newest=newest)
            if found is not None:
                return found
        return None

    def rows(self, info: SeriesInfo, start: int, stop: int, bucket: int) -> dict[str, Any]:
        """Return the rows from start to stop in buckets."""
        block = self.reader.read(info.id, start, stop, bucket)
        has_values: list[bool] = np.any(block.count + block.odd, axis=1).tolist()
        values = {
            key: _values(block, row, bucket)
            for row, key in enumerate(block.keys)
            if key in self.keys.drawn and has_values[row]
        }
        return {
            "end": stop,
            "bucket": bucket,
            "first": start - start % bucket,
            "reset": False,
            "t": [round(ts - self.created, 3) for ts in block.ts.tolist()],
            "s": [int(step) for step in block.step.tolist()],
            "v": values,
        }


def _newest_values(block: SeriesBlock) -> dict[str, float]:
    """Return the newest value of each metric in the block."""
    if not len(block):
        return {}
    present = (block.count + block.odd) > 0
    rows = np.flatnonzero(present.any(axis=1))
    newest = present.shape[1] - 1 - np.argmax(present[rows, ::-1], axis=1)
    values = block.mean[rows, newest].tolist()
    return {block.keys[row]: value for row, value in zip(rows.tolist(), values, strict=True)}


def _last_second(block: SeriesBlock) -> dict[str, float | int]:
    """Return samples/s and step time over the last second of timed steps.

    Both cover the same steps, so that the two tiles agree.
    """
    if not {RATE, STEP_TIME} <= set(block.keys):
        return {}
    rates, seconds = (block.mean[block.keys.index(key)] for key in (RATE, STEP_TIME))
    timed = np.flatnonzero(np.isfinite(rates) & (seconds > 0))
    if not len(timed):
        return {}
    latest = timed[block.ts[timed] > block.ts[timed[-1]] - RATE_S]
    mean = np.average(rates[latest], weights=seconds[latest])
    return {RATE: _number(float(mean)), STEP_TIME: _number(float(seconds[latest].mean()))}


def _values(block: SeriesBlock, row: int, bucket: int) -> dict[str, list[float | int | str | None]]:
    """Return a metric's values, and `odd`: names or counts of values that are not finite."""
    values: dict[str, list[float | int | str | None]] = {"mean": rounded(block.mean[row].tolist())}
    if bucket > 1:
        values["min"] = rounded(block.low[row].tolist())
        values["max"] = rounded(block.high[row].tolist())
    if block.odd[row].any():
        means, counts = block.mean[row].tolist(), block.odd[row].tolist()
        values["odd"] = [
            (number_name(mean) if bucket == 1 else int(count)) if count else None
            for mean, count in zip(means, counts, strict=True)
        ]
    return values


def rounded(values: Iterable[float | None]) -> list[float | int | str | None]:
    """Return values with the six digits of a chart; None for values that are not finite."""
    return [
        None if value is None or not math.isfinite(value) else _number(value) for value in values
    ]


def _number(value: float) -> float | int:
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def _event(event: EventRow, created: float) -> dict[str, Any]:
    return {
        "id": event.id,
        "t": round(event.ts - created, 3),
        "step": event.step,
        "epoch": event.epoch,
        "kind": event.kind,
        "text": event.text,
        "data": event.data,
    }


def _name(info: SeriesInfo) -> str:
    return f"{info.stream}/{info.source}" if info.source else info.stream
