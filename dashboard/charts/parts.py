"""The JSON parts that charts and number tiles are made of; pure."""

from __future__ import annotations

from typing import Any

from dashboard.charts.content import Gpu, RunContent
from stepscope.metrics import BY_KEY, Metric, Stream, Unit

Json = dict[str, Any]

# One color a metric, the same in every chart and tile; the component maps the names to a
# color-blind-safe palette for light and dark.
COLORS: dict[str, str] = {
    "train/loss": "blue",
    "val/loss": "orange",
    "train/lr": "blue",
    "train/grad_norm": "blue",
    "train/amp_scale": "blue",
    "memory/allocated": "blue",
    "memory/reserved": "orange",
    "memory/peak_allocated": "pink",
    "gpu/mem_used": "green",
    "gpu/mem_total": "gray",
    "process/rss": "blue",
    "process/peak_rss": "pink",
    "host/mem_used": "green",
    "host/mem_total": "gray",
    "process/cpu": "blue",
    "host/cpu": "green",
    "gpu/util": "green",
    "gpu/mem_util": "amber",
    "gpu/power": "amber",
    "gpu/power_limit": "gray",
    "gpu/temp": "orange",
    "perf/samples_per_sec": "blue",
    "perf/tokens_per_sec": "orange",
    "perf/step_time": "blue",
    "perf/data_wait": "orange",
    "perf/h2d": "green",
}
GPU_COLORS = tuple(f"gpu{place}" for place in range(8))
"""Of a GPU among several; none is a color of allocated, reserved, peak, used or total."""


def series_of(metric: Metric, gpu: Gpu | None = None) -> str:
    """Return the protocol's series name of a metric, e.g. `devices/GPU-…` for a GPU's."""
    if metric.stream is not Stream.DEVICES:
        return metric.stream.value
    if gpu is None:
        raise ValueError(f"gpu: is needed for {metric.key}, got None. Pass the GPU to draw.")
    return f"{Stream.DEVICES.value}/{gpu.uuid}"


def trace(
    key: str,
    style: str,
    *,
    gpu: Gpu | None = None,
    label: str | None = None,
    color: str | None = None,
    axis: str = "y",
    dash: str = "solid",
    optional: bool = False,
) -> Json:
    """One line. Styles: ema (smoothed over faint raw), mean (over a faint envelope), envelope
    (minimum to maximum, for memory: a short peak must stay visible), points, context (dashed;
    it counts for the axis only at full scale). A key that the metric table lacks is of the steps;
    an `optional` line has no legend entry until it has values."""
    metric = BY_KEY.get(key)
    return {
        "series": series_of(metric, gpu) if metric else Stream.STEPS.value,
        "metric": key,
        "label": label or (metric.label if metric else key),
        "style": style,
        "color": color or COLORS.get(key, "blue"),
        "axis": axis,
        "dash": "dash" if style == "context" else dash,
        "optional": optional,
    }


def y_axis(unit: Unit, *, fixed: tuple[float, float] | None = None, zero: bool = True) -> Json:
    """The vertical axis: its unit, a fixed range or one that follows, from zero or not."""
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
    """One chart. Groups: main, custom (small), optimizer (folded away, each chart only where it
    has values). `empty` is what stands in its place while no line has a value."""
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
    }


def training_gpu(content: RunContent) -> Gpu | None:
    """Return the GPU that the run trains on, else the first that is sampled."""
    named = (gpu for gpu in content.gpus if gpu.uuid == content.training_gpu)
    return next(named, content.gpus[0] if content.gpus else None)


def numbered(gpus: tuple[Gpu, ...]) -> list[tuple[Gpu, str, str | None]]:
    """Each GPU with a label suffix and a color; one GPU alone keeps the metrics' own colors."""
    if len(gpus) == 1:
        return [(gpus[0], "", None)]
    return [
        (gpu, f" {index}", GPU_COLORS[index % len(GPU_COLORS)]) for index, gpu in enumerate(gpus)
    ]


def color_of(gpu: Gpu | None, content: RunContent) -> str | None:
    """Return the color that tells a GPU from the others of its run; None where it is alone."""
    return next((color for each, _, color in numbered(content.gpus) if each == gpu), None)
