"""The heatmap of the ranks of a job: a row per rank, a column per span of time. No I/O."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from dashboard.charts import figures
from dashboard.charts.figures import Json
from dashboard.charts.series import event_json
from stepscope.alerts.settings import NO_STEP
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.run import RunInfo
from stepscope.run.rank_info import find_rank, numbers_with
from stepscope.store import EventRow, SeriesBlock, StoreError, StoreReader
from stepscope.store.blocks import Floats

MAX_COLUMNS = 120
MIN_WIDTH_S = 0.25  # of a column
MAX_TIME_S = 1e9  # a later time comes from a wrong clock or a damaged file
METRICS = (  # Metrics of the heatmap, in the order of the page.
    *("perf/step_time", "perf/comm_wait", "perf/data_wait"),
    *("memory/allocated", "process/rss", "gpu/util", "train/loss"),
)
HIGHEST = ("memory/allocated", "process/rss")  # the maximum of a column, not the mean
MIN_ROW_PX, MAX_ROW_PX = 6, 26
HEIGHT_PX = 384  # shared by the rows
FROM_ZERO = ("perf/comm_wait", "perf/data_wait")
MAX_LOW_SHARE = 0.7  # of the highest value: noise must not look like a difference
HIGH_QUANTILE = 0.98  # higher values, such as those of the first steps, have the strongest color
COLORS = [[0, "rgba(26,128,196,0.07)"], [1, figures.BLUE]]


def heatmap(
    blocks: Sequence[Sequence[SeriesBlock]], created: float
) -> tuple[float, dict[str, Floats]]:
    """Return the width of a column in seconds, and values (ranks, columns) by metric.

    `blocks`: the series of each rank. The columns hold the whole run since `created`.
    """
    times = [
        [np.where(block.ts - created < MAX_TIME_S, block.ts - created, np.nan) for block in each]
        for each in blocks
    ]
    latest = max(
        (float(np.nanmax(ts, initial=0.0)) for each in times for ts in each if len(ts)), default=0.0
    )
    width_s = MIN_WIDTH_S
    while latest >= MAX_COLUMNS * width_s:
        width_s *= 2
    shape = len(blocks), int(latest / width_s) + 1
    found: dict[str, Floats] = {}
    for metric in METRICS:
        sums, counts, tops = np.zeros(shape), np.zeros(shape), np.full(shape, np.nan)
        for rank, (each, each_times) in enumerate(zip(blocks, times, strict=True)):
            for block, ts in zip(each, each_times, strict=True):
                if metric not in block.keys:
                    continue
                place = block.keys.index(metric)
                good = np.isfinite(ts) & (block.count[place] > 0)
                column = (np.maximum(ts[good], 0.0) / width_s).astype(np.intp)
                count = block.count[place][good]
                with np.errstate(over="ignore", invalid="ignore"):  # damaged files
                    np.add.at(sums[rank], column, block.mean[place][good] * count)
                np.add.at(counts[rank], column, count)
                np.fmax.at(tops[rank], column, block.high[place][good])
        if counts.any():
            means = np.divide(sums, counts, out=np.full(shape, np.nan), where=counts > 0)
            found[metric] = tops if metric in HIGHEST else means
    return width_s, found


def metric_label(metric: str) -> str:
    label = BY_KEY[metric].label
    return label[0].upper() + label[1:]


def rank_heatmap(
    metric: str, values: Floats, width_s: float, ranks: Collection[int], named: Collection[int]
) -> Json:
    """Return the heatmap of values (ranks, columns); `named` ranks are marked."""
    low, high = color_range(values, metric)
    unit, size = _scale(BY_KEY[metric].unit, high)
    span_s = width_s * values.shape[1]
    time_unit, time_size = ("min", 60.0) if span_s > 180 else ("s", 1.0)
    edges = np.arange(values.shape[1] + 1) * width_s / time_size
    heat: Json = {
        "type": "heatmap",
        "x": edges,
        "y": [f"▸ {rank}" if rank in named else f"{rank}" for rank in ranks],
        "z": np.round(np.where(np.isfinite(values), values, np.nan) / size, 6),
        "zmin": low / size,
        "zmax": high / size,
        "colorscale": COLORS,
        "ygap": 1,
        "colorbar": {"thickness": 8, "outlinewidth": 0, "nticks": 4, "ticksuffix": unit},
        "hovertemplate": f"rank %{{y}}, %{{x:.1f}} {time_unit}: %{{z:.3g}}{unit}<extra></extra>",
    }
    row_px = max(MIN_ROW_PX, min(MAX_ROW_PX, HEIGHT_PX // len(ranks)))
    layout = figures.layout(
        row_px * len(ranks) + 60,
        margin={"l": 8, "r": 12, "t": 8, "b": 44},
        xaxis=figures.FIXED | {"title": figures.title(f"Time ({time_unit})"), "showgrid": False},
        yaxis=figures.FIXED
        | {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False}
        | {"title": figures.title("Rank")},
    )
    return {"data": [heat], "layout": layout}


def color_range(values: Floats, metric: str) -> tuple[float, float]:
    """Return the values of the weakest and the strongest color."""
    if metric == "gpu/util":
        return 0.0, 100.0
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    high = float(np.quantile(known, HIGH_QUANTILE))
    low = 0.0 if metric in FROM_ZERO else min(float(known.min()), MAX_LOW_SHARE * high)
    return low, high if high > low else low + (abs(low) or 1.0)


def _scale(unit: Unit, high: float) -> tuple[str, float]:
    """Return the unit of drawn values up to `high`, as it follows a number, and its size."""
    if unit is Unit.BYTES:
        name, size = figures.unit_of(high)
        return f" {name}", size
    if unit is Unit.SECOND:
        return (" ms", 1e-3) if high < 1 else (" s", 1.0)
    return unit.value, 1.0


ALERT = "alert"
MAX_EVENTS = 100  # newest events of all other ranks
MAX_READ = 1000  # newest events of a rank: epochs must not crowd out alerts

Events = list[dict[str, Any]]


def read_rank_events(run: RunInfo) -> Events:
    """Return the newest alerts and refused commands of the other ranks, oldest first.

    `no_step` alerts are omitted: rank 0 of a hanging job has them too. The ids are text.
    """
    numbers = filter(None, numbers_with(run.folder, "sqlite"))
    found = [event for number in numbers for event in _events(run, number)]
    return sorted(found, key=lambda event: event["t"])[-MAX_EVENTS:]


def unseen(events: Events, seen: str) -> tuple[Events, str]:
    """Return the events, none if their version is `seen`, and their version."""
    version = f"{zlib.crc32(repr([event['id'] for event in events]).encode()):x}"
    return [] if version == seen else events, version


def _events(run: RunInfo, number: int) -> Iterator[dict[str, Any]]:
    try:
        with StoreReader(run.folder, number) as reader:
            rows = [event for event in reader.events(limit=MAX_READ) if _is_shown(event)]
    except StoreError:  # being created, or damaged
        return
    file = find_rank(run.folder, number) if rows else None
    rank = number if file is None else file.rank
    for event in rows:
        shown = event_json(event, run.created)
        shown |= {"id": f"rank{number}-{event.id}", "text": f"Rank {rank}: {event.text}"}
        yield shown | {"data": {**event.data, "rank": rank}}


def _is_shown(event: EventRow) -> bool:
    if event.kind == ALERT:
        return event.data.get("rule") != NO_STEP
    return event.data.get("command_id") is not None and event.data.get("ok") is False
