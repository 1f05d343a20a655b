"""The memory breakdown of a run: its table, and its figure over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dashboard.charts import figures
from dashboard.charts.chart_spec import Json
from dashboard.charts.run_view import reasons_of, run_content
from stepscope.common.json_values import dict_of
from stepscope.memory.breakdown import (
    CATEGORIES,
    CategoryBytes,
    MemoryDomain,
    notes,
)
from stepscope.memory.breakdown_series import (
    BreakdownReading,
    breakdown_source,
    newest_breakdown,
    peaks,
    read_breakdown,
)
from stepscope.run import RunInfo
from stepscope.store import StoreReader

Row = dict[str, Any]  # Values by column title.
SPLIT = "memory/inactive_split"
NO_GRADIENTS = (
    "The peak of the gradients is unknown: no gradients existed when memory was measured, as after "
    "zero_grad()."
)
MAX_READINGS = 240  # drawn: each redraw sends all of them
TENSORS = ("activations", "optimizer_state", "gradients", "parameters")
SUMS: Mapping[MemoryDomain, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    MemoryDomain.DEVICE: (
        ("reserved", "reserved by PyTorch", ("split", "cached", *TENSORS)),
        ("allocated", "allocated", TENSORS),
    ),
    MemoryDomain.HOST: (("process", "this process", ("rest", *TENSORS[1:])),),
}
"""Rows of the table that sum the rows below them: key, label, categories."""
# Tensors are blue and cache is orange. The areas touch; each differs from its neighbors on a light
# and on a dark background.
COLORS = {
    "driver": "#8a919c",
    "others": "#c4ae3f",
    "elsewhere": "#b97f4e",
    "outside": "#9b6fc4",
    "split": "#d5691f",
    "cached": "#e0a36a",
    "workers": "#5c9e8f",
    "rest": "#8cc4e8",
    "activations": "#8cc4e8",
    "optimizer_state": "#2a86c7",
    "gradients": "#6cb0e0",
    "parameters": "#1f5f96",
}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The memory of a run: over time, now, and each category's own peak; `notes` are sentences."""

    place: MemoryDomain
    readings: list[BreakdownReading]
    now: CategoryBytes
    peaks: CategoryBytes
    notes: list[str]


def breakdown_of(run: RunInfo) -> Breakdown | None:
    """Return the memory breakdown of a run; None before any sample. Raises StoreError."""
    with StoreReader(run.folder) as reader:
        source = breakdown_source(reader.series(), run_content(run).training_gpu)
        if source is None:
            return None
        now = newest_breakdown(reader, source)
        categories = {} if now is None else now.categories or {}
        highest = peaks(reader, source)
        return Breakdown(
            place=source.place,
            readings=read_breakdown(reader, source, MAX_READINGS),
            now=categories,
            peaks=highest,
            notes=_notes(categories, run, source.place, highest),
        )


def breakdown_rows(found: Breakdown) -> list[Row]:
    """Return the categories from top to bottom in bytes, a sum above its parts, and the total."""
    total = sum(found.now.values())

    def row(name: str, depth: int, key: str, now: int, meaning: str) -> Row:
        return {
            "Category": "\u2003" * depth + name,
            "Now": now,
            "Share": 100 * now / total if total else None,
            "Peak": found.peaks.get(key),
            "Meaning": meaning,
        }

    sums = [
        (key, label, [part for part in parts if part in found.now])
        for key, label, parts in SUMS[found.place]
    ]
    rows: list[Row] = []
    listed: set[str] = set()
    for one in CATEGORIES[found.place]:
        if one.key not in found.now:
            continue
        around = [each for each in sums if one.key in each[2]]
        for depth, (key, label, parts) in enumerate(around):
            if key not in listed:
                now = sum(found.now[part] for part in parts)
                rows.append(row(label, depth, key, now, "Sum of the rows below it."))
            listed.add(key)
        rows.append(row(one.label, len(around), one.key, found.now[one.key], one.help))
    return [*rows, row("total", 0, "total", total, "Sum of all categories.")]


def breakdown_figure(found: Breakdown, created: float) -> Json:
    """Return the used categories over time as stacked areas, in the order of the table."""
    known = [(one.ts - created, one.categories) for one in found.readings if one.categories]
    shown = [one for one in CATEGORIES[found.place] if one.key != "free"]
    used = [sum(size for key, size in parts.items() if key != "free") for _, parts in known]
    unit, size = figures.unit_of(max(used, default=0))
    time_unit, time_size = ("min", 60.0) if known and known[-1][0] > 180 else ("s", 1.0)
    times = np.round([seconds / time_size for seconds, _ in known], 3)
    areas = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": one.label,
            "x": times,
            "y": np.round([parts.get(one.key, 0) / size for _, parts in known], 4),
            "stackgroup": "categories",
            "fillcolor": COLORS[one.key],
            "line": {"width": 0.5, "color": COLORS[one.key]},
            "hovertemplate": f"%{{y:.3g}} {unit}",
        }
        for one in reversed(shown)
        if any(one.key in parts for _, parts in known)
    ]
    layout = figures.layout(
        380,
        dragmode="zoom",
        hovermode="x unified",
        legend={"orientation": "v", "traceorder": "reversed", "itemclick": "toggle"},
        margin={"l": 8, "r": 12, "t": 12, "b": 44},
        xaxis={"title": figures.title(f"Time ({time_unit})"), "showgrid": False},
        yaxis=figures.FIXED | {"ticksuffix": f" {unit}", "rangemode": "tozero"},
    )
    return {"data": areas, "layout": layout}


def missing_reasons(run: RunInfo) -> dict[str, str]:
    """Return the recorded reasons for missing metrics of the breakdown."""
    content, capabilities = run_content(run), run.run_json.get("capabilities") or {}
    of_gpus = dict_of(capabilities.get("missing"))
    found = dict_of(of_gpus.get(content.training_gpu or ""))
    reasons = reasons_of(found)
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
