"""Answers of `/api/series` and `/api/window` as JSON values: new points at a fitting resolution.

A client holds at most TARGET buckets of each series and sends a cursor of the rows that it has. The
size of an answer does not depend on the length of the run. `dashboard/live_chart` is the client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dashboard.charts.chart_spec import COLORS
from dashboard.charts.run_view import (
    custom_metrics,
    optimizer_keys,
    optimizer_names,
    rate_keys,
    state,
)
from stepscope.common.formatting import number_name
from stepscope.common.metrics import Stream
from stepscope.run import RunInfo
from stepscope.store import EventRow, SeriesBlock, SeriesInfo, StoreReader
from stepscope.store.blocks import RATE, STEP_TIME
from stepscope.store.final_values import bucket_for
from stepscope.store.reader import Axis

TARGET = 500  # buckets of a chart, at most
MAX_NEW = 250  # new buckets; with more, a fresh overview is smaller
MAX_EVENTS = 1000  # newest events of an answer
ROUTINE = ("epoch", "checkpoint")  # must not crowd out commands and alerts
RECENT_ROWS = 24  # searched for the newest value: 2.4 s of samples, more than the slowest tier
RECENT_STEPS = 512  # searched for the newest value of a step
RATE_S = 1.0  # the rate is averaged over it: a single step may be an epoch's short last batch
FOLDED = {
    *("train/amp_scale", "train/amp_skipped"),
    *("perf/tokens_per_sec", "perf/tflops", "perf/mfu"),
    *("gpu/temp", "gpu/power_limit"),
}
"""Metrics of folded charts, like learning rates and gradient norms: sent only while open."""
LIVE_KEYS = COLORS.keys() - FOLDED - {"train/lr", "train/grad_norm"} | {
    *("val/accuracy", "sampler/cost")
}
"""Metrics of charts and tiles, sent with every poll."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The metrics sent to a client: lines (`drawn`) and newest values (`last`)."""

    drawn: set[str]
    last: set[str]


@dataclass(frozen=True, slots=True)
class SeriesCursor:
    """A client's state of a series: it has `row` rows in buckets of `bucket` rows."""

    row: int
    bucket: int


def keys_of(run: RunInfo, include_folded: bool) -> Keys:
    """Return the metrics to send; those of folded charts only on request."""
    optimizers = len(optimizer_names(run.run_json))
    rates = (key for key, _, _ in rate_keys(optimizers))
    folded = {*FOLDED, *optimizer_keys("train/grad_norm", optimizers), *rates}
    losses = optimizer_keys("train/loss", optimizers)
    custom, _ = custom_metrics(run.run_json)
    drawn = {*LIVE_KEYS, *custom, *losses, *(folded if include_folded else ())}
    return Keys(drawn, {*drawn, *folded, "train/epoch"})


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


def span(rows: int, cursor: SeriesCursor | None) -> tuple[int, int, int, bool]:
    """Return start, stop and bucket of the rows to send; True if they replace all earlier rows.

    The rows after the cursor, or an overview if that is smaller.
    """
    natural = bucket_for(rows, TARGET)
    if cursor is not None and cursor.row <= rows:
        bucket = max(cursor.bucket, natural)
        if rows - cursor.row <= MAX_NEW * bucket:
            return cursor.row, rows, bucket, False
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
    series = {_name(info): part.update(info, cursors.get(_name(info))) for info in reader.series()}
    answer = {**state(run), "series": series, "events": events(reader, run, after_event)}
    if "steps" in series:
        # The rows are newer than run.json, which is rewritten once a second.
        newest = {
            "step": series["steps"]["last"].pop("step", None),  # None: damaged frames
            "epoch": series["steps"]["last"].pop("train/epoch", None),
        }
        answer["progress"] |= {name: value for name, value in newest.items() if value is not None}
    return answer


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
        found[_name(info)] = part.rows(info, start, stop, bucket_for(stop - start, TARGET))
    return found


def events(reader: StoreReader, run: RunInfo, after: int) -> list[dict[str, Any]]:
    """Return the newest events after an id, and the newest that are not routine; oldest first."""
    newest = reader.events(after, MAX_EVENTS)
    if after == 0 or len(newest) == MAX_EVENTS:
        others = reader.events(after, MAX_EVENTS, without=ROUTINE)
        known = {event.id for event in newest}
        newest = [*(event for event in others if event.id not in known), *newest]
    return [event_json(event, run.created) for event in newest]


@dataclass(frozen=True, slots=True)
class _SeriesResponse:
    """The shared inputs of all series of one answer."""

    reader: StoreReader
    created: float
    keys: Keys

    def update(self, info: SeriesInfo, cursor: SeriesCursor | None) -> dict[str, Any]:
        """Return the rows after a cursor, or an overview if that is smaller, and `last`.

        `last` has the newest value of each metric in the last rows.
        """
        start, stop, bucket, reset = span(info.rows, cursor)
        start -= start % bucket  # also without new rows: the client replaces its last bucket
        block = self.reader.read(info.id, start, stop, bucket)
        of_steps = info.stream == Stream.STEPS
        newest = max(0, stop - (RECENT_STEPS if of_steps else RECENT_ROWS))
        last = self._last(self.reader.read(info.id, newest, stop, 1), of_steps)
        return _position(start, stop, bucket, reset) | self._rows(block, bucket) | {"last": last}

    def rows(self, info: SeriesInfo, start: int, stop: int, bucket: int) -> dict[str, Any]:
        rows = self._rows(self.reader.read(info.id, start, stop, bucket), bucket)
        return _position(start, stop, bucket, reset=False) | rows

    def _last(self, block: SeriesBlock, is_steps: bool) -> dict[str, float | int | str | None]:
        last: dict[str, float | int | str | None] = {
            key: _number(value) if math.isfinite(value) else number_name(value)
            for key, value in _newest_values(block).items()
            if key in self.keys.last
        }
        if is_steps and len(block):
            last |= {"step": int(block.step[-1]), **_last_second(block)}
        return last

    def _rows(self, block: SeriesBlock, bucket: int) -> dict[str, Any]:
        has_values: list[bool] = np.any(block.count + block.nonfinite, axis=1).tolist()
        values = {
            key: _values(block, row, bucket)
            for row, key in enumerate(block.keys)
            if key in self.keys.drawn and has_values[row]
        }
        return {
            "t": [round(ts - self.created, 3) for ts in block.ts.tolist()],
            "s": [int(step) for step in block.step.tolist()],
            "v": values,
        }


def _position(start: int, stop: int, bucket: int, reset: bool) -> dict[str, Any]:
    """Return the rows of an answer: their range, their bucket, and whether they replace others."""
    return {"end": stop, "bucket": bucket, "first": start - start % bucket, "reset": reset}


def _newest_values(block: SeriesBlock) -> dict[str, float]:
    if not len(block):
        return {}
    present = (block.count + block.nonfinite) > 0
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
        values["count"] = block.count[row].astype(int).tolist()
    if block.nonfinite[row].any():
        means, counts = block.mean[row].tolist(), block.nonfinite[row].tolist()
        values["odd"] = [
            (number_name(mean) if bucket == 1 else int(count)) if count else None
            for mean, count in zip(means, counts, strict=True)
        ]
    return values


def rounded(values: Iterable[float]) -> list[float | int | str | None]:
    """Return values with the six digits of a chart; None for values that are not finite."""
    return [_number(value) if math.isfinite(value) else None for value in values]


def _number(value: float) -> float | int:
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def event_json(event: EventRow, created: float) -> dict[str, Any]:
    """Return an event as a JSON value; its time in seconds since `created`."""
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
