"""Builders of the JSON for charts and tiles. No I/O."""

from __future__ import annotations

import itertools
from typing import Any

from dashboard.charts.run_view import RunView, SampledGpu
from stepscope.common.metrics import BY_KEY, Metric, Stream, Unit
from stepscope.run import RunKind

Json = dict[str, Any]

# The color of each metric in every chart and tile; theme.js has them for light and dark.
_KEYS = {
    "blue": (
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "train/amp_scale",
        "memory/allocated",
        "process/rss",
        "process/cpu",
        "perf/samples_per_sec",
        "perf/tflops",
        "perf/step_time",
    ),
    "orange": (
        "val/loss",
        "memory/reserved",
        "gpu/temp",
        "perf/tokens_per_sec",
        "perf/mfu",
        "perf/data_wait",
    ),
    "green": (
        "gpu/mem_used",
        "host/mem_used",
        "host/cpu",
        "gpu/util",
        "perf/h2d",
    ),
    "pink": (
        "memory/peak_allocated",
        "process/peak_rss",
        "perf/gpu_time",
    ),
    "amber": (
        "gpu/mem_util",
        "gpu/power",
    ),
    "gray": (
        "gpu/mem_total",
        "host/mem_total",
        "gpu/power_limit",
    ),
}
COLORS = {key: color for color, keys in _KEYS.items() for key in keys}
LINES = ("blue", "green", "orange", "pink", "amber", "gray")  # of lines with one metric
GPU_COLORS = tuple(f"gpu{index}" for index in range(8))  # unlike memory metrics


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
    An `optional` line, or one that its GPU lacks, has no legend entry until it has values.
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
    }


def gpu_traces(content: RunView, key: str, label: str, **options: Any) -> list[Json]:
    """Return one line per GPU; several are numbered and have the GPU colors."""
    if len(content.gpus) == 1:
        return [trace(key, gpu=content.gpus[0], label=label, **options)]
    return [
        trace(key, gpu=gpu, label=f"{label} {gpu.index}", color=color, **options)
        for gpu, color in zip(content.gpus, itertools.cycle(GPU_COLORS), strict=False)
    ]


def y_axis(unit: Unit, *, fixed: tuple[float, float] | None = None, zero: bool = True) -> Json:
    """Return a vertical axis with a fixed or following range, from zero or not."""
    return {"unit": unit.value, "range": list(fixed) if fixed else None, "zero": zero}


def chart(
    chart_id: str,
    title: str,
    traces: list[Json],
    *,
    group: str = "main",
    y: Json | None = None,
    y2: Json | None = None,
    note: str | None = None,
    empty: str | None = None,
    loss: bool = False,
    warm_up: int = 0,
) -> Json:
    """Return one chart; `empty` is shown while no line has a value.

    Groups: main, custom (small), more (folded).
    """
    return {
        "id": chart_id,
        "title": title,
        "group": group,
        "y": y or y_axis(Unit.NONE, zero=False),
        "y2": y2,
        "traces": traces,
        "note": note,
        "empty": empty,
        "loss": loss,
        "warm_up": warm_up,
    }


def training_gpu(content: RunView) -> SampledGpu | None:
    """Return the training GPU, else the first sampled GPU."""
    named = (gpu for gpu in content.gpus if gpu.uuid == content.training_gpu)
    return next(named, content.gpus[0] if content.gpus else None)


NO_SAMPLES = {
    RunKind.WATCH: "Unknown: samples are counted for batches from a torch DataLoader.",
    RunKind.INIT: "Unknown: pass samples= to each step, or take batches from rec.batches().",
}
NO_EPOCH = {
    RunKind.WATCH: "Unknown: epochs are counted for batches from a torch DataLoader.",
    RunKind.INIT: "Unknown: the script has not set rec.epoch.",
}
GPU_TILES = {  # Id of each tile, and its label for one GPU and for several.
    "gpu/util": ("gpu_util", "Utilization", "Mean utilization"),
    "gpu/power": ("power", "Power", "Mean power"),
}


def tiles(content: RunView) -> list[Json]:
    """Return the tiles; samples/s of a job assumes equal batch sizes of all ranks."""
    rate: Json = {"reason": NO_SAMPLES.get(content.kind), "scale": content.ranks}
    if content.samples_per_s is None:
        rate["ended"] = "last"  # the mean of rates is not the rate of a run
    else:
        rate["whole"] = content.samples_per_s / content.ranks
    of_rank = [
        _tile("loss", "Loss", "train/loss") | {"also": ["val/loss", "val/accuracy"]},
        _tile("samples_per_sec", "Samples/s", "perf/samples_per_sec") | rate,
        _tile("step_time", "Step time", "perf/step_time"),
        *(_allocator(content) if content.has_cuda else _process()),
    ]
    if content.ranks > 1:
        for tile in of_rank:
            whose = f"all {content.ranks} ranks" if "scale" in tile else "rank 0"
            tile["label"] = f"{tile['label']}, {whose}"
    used = tuple(gpu for gpu in content.gpus if gpu.uuid in content.used_gpus)
    return [*of_rank, *_gpus(content, used or content.gpus)]


def _allocator(content: RunView) -> list[Json]:
    gpu = training_gpu(content)
    total = {} if gpu is None else _device_total(gpu)
    return [
        _tile("allocated", "Allocated", "memory/allocated") | total,
        _tile("reserved", "Reserved", "memory/reserved") | total,
        _tile("peak", "Peak allocated", "memory/peak_allocated") | total,
    ]


def _process() -> list[Json]:
    return [
        _tile("process_memory", "Process memory", "process/rss") | _host_total(),
        _tile("peak_process_memory", "Peak memory", "process/peak_rss") | _host_total(),
        _tile("process_cpu", "Process CPU", "process/cpu"),
    ]


def _gpus(content: RunView, gpus: tuple[SampledGpu, ...]) -> list[Json]:
    if not gpus:
        return []
    made = []
    for key, (tile_id, one, many) in GPU_TILES.items():
        label = one if len(gpus) == 1 else many
        if len(gpus) == 1 < len(content.gpus):
            label = f"{one}, GPU {gpus[0].index}"
        made.append(_tile(tile_id, label, key, gpus))
    return made


def _tile(tile_id: str, label: str, key: str, gpus: tuple[SampledGpu, ...] = ()) -> Json:
    """Return a tile with the newest value of its series, or mean and range of several series.

    `ended`: the value of an ended run, mean, peak or last; `whole`: the mean, if that of the values
    is not the one of the run. `reason`: why a value may be missing. `hide`: no tile until a value
    exists.
    """
    metric = BY_KEY[key]
    many = metric.stream is Stream.DEVICES
    return {
        "id": tile_id,
        "label": label,
        "series": [series_of(metric, gpu) for gpu in gpus] if many else [series_of(metric)],
        "metric": key,
        "unit": metric.unit.value,
        "color": COLORS[key],
        "title": metric.meaning,
        "reason": None,
        "ended": "last" if key == "train/loss" else "peak" if metric.unit is Unit.BYTES else "mean",
        "hide": many and all(key in gpu.missing for gpu in gpus),
    }


def _device_total(gpu: SampledGpu) -> Json:
    series = series_of(BY_KEY["gpu/mem_total"], gpu)
    return {"of": {"series": series, "metric": "gpu/mem_total", "value": gpu.memory_bytes}}


def _host_total() -> Json:
    return {"of": {"series": Stream.SAMPLES.value, "metric": "host/mem_total"}}
