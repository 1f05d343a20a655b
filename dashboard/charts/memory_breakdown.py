"""The memory breakdown of a run: its chart, its rows over time, and its table."""

from __future__ import annotations

from collections.abc import Mapping

from dashboard.charts.chart_spec import Json, chart, trace, training_gpu, y_axis
from dashboard.charts.run_state import state
from dashboard.charts.run_view import RunView, run_content
from dashboard.charts.series import SeriesCursor, events, fitting_bucket, position, rounded, span
from stepscope.common.json_values import dict_of
from stepscope.memory.breakdown import (
    CATEGORIES,
    CategoryBytes,
    MemoryDomain,
    notes,
)
from stepscope.memory.breakdown_series import (
    BreakdownSample,
    BreakdownSource,
    ledger_source,
    newest_moment,
    peaks,
    read_moments,
)
from stepscope.metrics import METRICS, Unit
from stepscope.run import RunInfo, RunKind
from stepscope.store import StoreReader
from stepscope.store.reader import Axis

SERIES = "ledger"  # Series name in the protocol; its metric `ledger/X` is category X in bytes.
TOTAL = f"{SERIES}/total"
SPLIT = "memory/inactive_split"
NO_GRADIENTS = (
    "The peak of the gradients is unknown: no gradients existed when memory was measured, as after "
    "zero_grad()."
)
CHART_HEIGHT = 380  # px, on the Memory tab
TENSORS = ("activations", "optimizer_state", "gradients", "parameters")
SUMS: Mapping[MemoryDomain, tuple[tuple[str, str, str, tuple[str, ...]], ...]] = {
    MemoryDomain.DEVICE: (
        (
            "reserved",
            "reserved by PyTorch",
            "orange",
            ("split", "cached", "cache", *TENSORS, "allocated"),
        ),
        ("allocated", "allocated", "blue", TENSORS),
    ),
    MemoryDomain.HOST: (("process", "this process", "blue", ("rest", *TENSORS[1:])),),
}
"""Rows of the table that sum the rows below them: key, label, color, categories."""


def gpu_of(content: RunView) -> str | None:
    """Return the UUID of the GPU whose memory is shown; None for host memory."""
    if content.kind is RunKind.RECORD:
        gpu = training_gpu(content)
        return None if gpu is None else gpu.uuid
    return content.training_gpu


def metric_words() -> dict[str, Json]:
    """Return unit and label of every metric and memory category."""
    known = {metric.key: (metric.unit, metric.label) for metric in METRICS}
    parts = {part.key: part.label for listed in CATEGORIES.values() for part in listed}
    known |= {f"{SERIES}/{key}": (Unit.BYTES, label) for key, label in parts.items()}
    known[TOTAL] = (Unit.BYTES, "total")
    return {key: {"unit": unit.value, "label": label} for key, (unit, label) in known.items()}


def ledger_layout(run: RunInfo) -> Json:
    """Return the component's layout of the Memory tab: one chart, and the sums of its table."""
    content = run_content(run)
    place = MemoryDomain.HOST if gpu_of(content) is None else MemoryDomain.DEVICE
    drawn = chart(
        "ledger",
        "Memory over time",
        [
            *(_trace(one.key, one.label, "part", one.color, one.help) for one in CATEGORIES[place]),
            _trace("total", "total", "context", "gray", ""),
        ],
        kind="ledger",
        y=y_axis(Unit.BYTES),
        empty="No readings yet.",
    )
    return {
        "charts": [drawn | {"height": CHART_HEIGHT}],
        "metrics": metric_words(),
        "sums": [
            {
                "key": f"{SERIES}/{name}",
                "label": label,
                "color": color,
                "of": [f"{SERIES}/{key}" for key in keys],
            }
            for name, label, color, keys in SUMS[place]
        ],
        "axis": "time",
    }


def update(
    reader: StoreReader, run: RunInfo, cursors: Mapping[str, SeriesCursor], after_event: int
) -> Json:
    """Return the answer to a poll of the Memory tab: new rows, newest sample, and peaks."""
    answer = {**state(run), "events": events(reader, run, after_event)}
    source = _source(reader, run)
    if source is None:
        return answer
    now = newest_moment(reader, source)
    start, stop, bucket, reset = span(source.samples.rows, cursors.get(SERIES))
    parts = {} if now is None else now.parts or {}
    rows = _rows(reader, run, source, start, stop, bucket)
    highest = peaks(reader, source)
    answer["series"] = {SERIES: rows | {"reset": reset, "last": _values(parts)}}
    answer["ledger"] = {
        "now": _moment(now, run),
        "peaks": {f"{SERIES}/{part}": size for part, size in highest.items()},
        "notes": _notes(parts, run, source.place, highest),
    }
    return answer


def window_part(reader: StoreReader, run: RunInfo, axis: Axis, low: float, high: float) -> Json:
    """Return the rows between two steps, or two times in seconds since the run's start."""
    source = _source(reader, run)
    if source is None:
        return {}
    if axis == "time":
        low, high = low + run.created, high + run.created
    start, stop = reader.rows_between(source.samples.id, axis, low, high)
    start, stop = max(0, start - 1), min(source.samples.rows, stop + 1)
    return {SERIES: _rows(reader, run, source, start, stop, fitting_bucket(stop - start))}


def _source(reader: StoreReader, run: RunInfo) -> BreakdownSource | None:
    """Return the source of the breakdown, without the split metric if it is unavailable."""
    split = (run.run_json.get("capabilities") or {}).get("split")
    left_out = frozenset({SPLIT} if isinstance(split, str) else ())
    return ledger_source(reader.series(), gpu_of(run_content(run)), left_out)


def missing_reasons(run: RunInfo) -> dict[str, str]:
    """Return the recorded reasons for missing metrics of the breakdown."""
    content, capabilities = run_content(run), run.run_json.get("capabilities") or {}
    of_gpus = dict_of(capabilities.get("missing"))
    found = dict_of(of_gpus.get(gpu_of(content) or ""))
    reasons = {key: why for key, why in found.items() if isinstance(why, str)}
    for key, why in (
        ("memory/process_used", found.get("processes")),
        ("gpu/mem_others", found.get("processes")),
        ("memory/reserved", capabilities.get("allocator")),
        ("gpu/mem_used", capabilities.get("nvml")),
        ("memory/parameters", capabilities.get("parts")),
        (SPLIT, capabilities.get("split")),
    ):
        if isinstance(why, str):
            reasons.setdefault(key, why)
    return reasons


def _notes(
    parts: CategoryBytes, run: RunInfo, place: MemoryDomain, highest: CategoryBytes
) -> list[str]:
    """Return which categories cannot be separated now, or have no peak, and why."""
    if not parts:
        return []
    found = list(notes(parts, place, missing_reasons(run)))
    if "gradients" in parts and "gradients" not in highest:
        found.append(NO_GRADIENTS)
    return found


def _trace(key: str, label: str, style: str, color: str, words: str) -> Json:
    drawn = trace(f"{SERIES}/{key}", style, label=label, color=color, optional=True)
    return drawn | {"series": SERIES, "help": words}


def _rows(
    reader: StoreReader, run: RunInfo, source: BreakdownSource, start: int, stop: int, bucket: int
) -> Json:
    found = read_moments(reader, source, start, stop, bucket) if start < stop else []
    rows = [_values(moment.parts or {}) for moment in found]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {
        **position(start, stop, bucket, reset=False),
        "stack": True,
        "t": [round(moment.ts - run.created, 3) for moment in found],
        "s": [moment.step for moment in found],
        "v": {key: {"mean": rounded(row.get(key) for row in rows)} for key in keys},
    }


def _values(parts: CategoryBytes) -> dict[str, int]:
    """Return the categories as metrics; the total only if they add up to the whole."""
    found = {f"{SERIES}/{key}": size for key, size in parts.items()}
    return found | {TOTAL: sum(parts.values())} if "free" in parts else found


def _moment(moment: BreakdownSample | None, run: RunInfo) -> Json | None:
    if moment is None or moment.parts is None:
        return None
    values = _values(moment.parts)
    values.setdefault(TOTAL, sum(moment.parts.values()))
    return {"t": round(moment.ts - run.created, 3), "s": moment.step, "v": values}
