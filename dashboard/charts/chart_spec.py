"""Builders of the JSON for charts and tiles. No I/O."""

from __future__ import annotations

import itertools
from typing import Any

from dashboard.charts.run_view import RunView, SampledGpu
from stepscope.metrics import BY_KEY, Metric, Stream, Unit

Json = dict[str, Any]

# The color of each metric in every chart and tile. The component maps the names to a
# color-blind-safe palette for light and dark.
_KEYS = {
    "blue": (
        *("train/loss", "train/lr", "train/grad_norm", "train/amp_scale", "memory/allocated"),
        *("process/rss", "process/cpu", "perf/samples_per_sec", "perf/tflops", "perf/step_time"),
        "comm/rate",
    ),
    "orange": (
        *("val/loss", "memory/reserved", "gpu/temp", "perf/tokens_per_sec", "perf/mfu"),
        *("perf/data_wait", "comm/share"),
    ),
    "green": (
        *("gpu/mem_used", "host/mem_used", "host/cpu", "gpu/util", "perf/h2d"),
        "comm/bus_bandwidth",
    ),
    "pink": ("memory/peak_allocated", "process/peak_rss", "perf/gpu_time"),
    "amber": ("gpu/mem_util", "gpu/power"),
    "gray": ("gpu/mem_total", "host/mem_total", "gpu/power_limit"),
}
COLORS = {key: color for color, keys in _KEYS.items() for key in keys}
LINES = ("blue", "green", "orange", "pink", "amber", "gray")
"""Colors of lines with one metric, such as the losses of several optimizers."""
GPU_COLORS = tuple(f"gpu{index}" for index in range(8))
"""Colors of several GPUs, distinct from those of the memory metrics."""
MIN_HEAT_GPUS = 4  # more lines would overlap: a heatmap is drawn instead


def series_of(metric: Metric, gpu: SampledGpu | None = None) -> str:
    """Return the series name of a metric, `devices/GPU-…` for that of a GPU."""
    if metric.stream is not Stream.DEVICES:
        return metric.stream.value
    if gpu is None:
        raise ValueError(f"gpu: must be set for {metric.key}, got None. Pass the GPU to draw.")
    return f"{Stream.DEVICES.value}/{gpu.uuid}"


def trace(
    key: str,
    style: str = "mean",
    *,
    gpu: SampledGpu | None = None,
    label: str | None = None,
    color: str | None = None,
    axis: str = "y",
    dash: str = "solid",
    optional: bool = False,
) -> Json:
    """Return one line.

    Styles: mean (over a faint band from minimum to maximum), ema (smoothed, with the same band),
    peak (the maximum over the band), points, context (dashed; scales the axis only at full scale).
    Metrics outside the metric table belong to the steps. An `optional` line, or one of a metric
    that its GPU lacks, has no legend entry until it has values.
    """
    metric = BY_KEY.get(key)
    return {
        "series": series_of(metric, gpu) if metric else Stream.STEPS.value,
        "metric": key,
        "label": label or (metric.label if metric else key),
        "style": style,
        "color": color or COLORS.get(key, "blue"),
        "axis": axis,
        "dash": "dash" if style == "context" else dash,
        "optional": optional or (gpu is not None and key in gpu.missing),
        "gpu": None if gpu is None else gpu.index,
    }


def gpu_traces(content: RunView, key: str, label: str, **options: Any) -> list[Json]:
    """Return one line per GPU; several are numbered and have the GPU colors."""
    if len(content.gpus) == 1:
        return [trace(key, gpu=content.gpus[0], label=label, **options)]
    return [
        trace(key, gpu=gpu, label=f"{label} {gpu.index}", color=color, **options)
        for gpu, color in zip(content.gpus, itertools.cycle(GPU_COLORS), strict=False)
    ]


def gpu_kind(content: RunView) -> str:
    """Return the kind of a chart with one line per GPU: "heat" for many GPUs."""
    return "heat" if len(content.gpus) >= MIN_HEAT_GPUS else "lines"


def y_axis(unit: Unit, *, fixed: tuple[float, float] | None = None, zero: bool = True) -> Json:
    """Return a vertical axis with a fixed or following range, from zero or not."""
    return {"unit": unit.value, "range": list(fixed) if fixed else None, "zero": zero}


def chart(
    chart_id: str,
    title: str,
    traces: list[Json],
    *,
    kind: str = "lines",
    group: str = "main",
    y: Json | None = None,
    y2: Json | None = None,
    note: str | None = None,
    empty: str | None = None,
    loss: bool = False,
    warm_up: int = 0,
) -> Json:
    """Return one chart.

    Kinds: lines, heat (one row per GPU; the lines of a GPU that the user selects), ledger (stacked
    categories). Groups: main, custom (small), more (folded).
    `empty` is shown while no line has a value.
    """
    return {
        "id": chart_id,
        "title": title,
        "kind": kind,
        "group": group,
        "y": y or y_axis(Unit.NONE, zero=False),
        "y2": y2,
        "traces": traces,
        "note": note,
        "empty": empty,
        "loss": loss,
        "warm_up": warm_up,
        "heat": COLORS[traces[0]["metric"]] if kind == "heat" else None,
    }


def training_gpu(content: RunView) -> SampledGpu | None:
    """Return the training GPU, else the first sampled GPU."""
    named = (gpu for gpu in content.gpus if gpu.uuid == content.training_gpu)
    return next(named, content.gpus[0] if content.gpus else None)
