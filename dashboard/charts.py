"""Which charts and number tiles a run shows, as JSON for the live chart component.

Pure: run facts in, a layout out. The samples themselves never pass here; the component in the
browser fetches them by the series and metric names that the layout gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepscope.metrics import BY_KEY, METRICS, Metric, Stream, Unit

Json = dict[str, Any]

NO_ALLOCATOR = (
    "allocated and reserved are counters of torch's CUDA allocator; on the CPU torch keeps none, "
    "so process memory is shown instead."
)
WARM_UP_ROWS = 3
"""First steps of a run, slow by nature: drawn, but they do not set the scale of step time."""
NO_GPU = "no GPU was sampled in this run."

# One colour a metric, the same in every chart and tile; the component maps the names to a
# colour-blind-safe palette for light and dark.
_COLOURS: dict[str, str] = {
    "train/loss": "blue",
    "val/loss": "orange",
    "memory/allocated": "blue",
    "memory/reserved": "orange",
    "memory/peak_allocated": "pink",
    "gpu/mem_used": "green",
    "gpu/mem_total": "grey",
    "process/rss": "blue",
    "process/peak_rss": "pink",
    "host/mem_used": "green",
    "process/cpu": "blue",
    "host/cpu": "green",
    "gpu/util": "green",
    "gpu/mem_util": "amber",
    "gpu/power": "amber",
    "gpu/power_limit": "grey",
    "gpu/temp": "orange",
    "perf/samples_per_sec": "blue",
    "perf/step_time": "blue",
    "perf/data_wait": "orange",
}
_GPU_COLOURS = ("green", "blue", "orange", "pink", "amber", "grey")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that the run's sampler watches; `memory_bytes` is its installed memory if known."""

    uuid: str
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The linear workload's data: points to draw and the line they were made from."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    slope: float
    intercept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the layout depends on.

    `has_cuda`: the run trains on a CUDA device. `training_gpu` is its UUID, by default the first
    of `gpus`. `gpu_reason` and `allocator_reason` say why GPU or allocator values do not exist.
    """

    has_cuda: bool
    gpus: tuple[Gpu, ...] = ()
    training_gpu: str | None = None
    gpu_reason: str = NO_GPU
    allocator_reason: str = NO_ALLOCATOR
    fit: Fit | None = None


def layout(facts: RunFacts) -> Json:
    """Return the component's layout: `charts`, `kpis`, `fit`, `metrics` (unit, label by key)."""
    charts = [_loss(), _memory(facts), _utilisation(facts), _throughput(), _step_time()]
    if facts.gpus:
        charts.insert(3, _power(facts))
    if facts.fit is not None:
        charts.insert(1, _chart("fit", "Fit", [], kind="fit"))
    return {
        "charts": charts,
        "kpis": _kpis(facts),
        "metrics": {m.key: {"unit": m.unit.value, "label": m.label} for m in METRICS},
        "fit": _fit(facts.fit),
    }


def series_of(metric: Metric, gpu: Gpu | None = None) -> str:
    """Return the protocol's series name of a metric, e.g. `devices/GPU-…` for a GPU's."""
    if metric.stream is not Stream.DEVICES:
        return metric.stream.value
    if gpu is None:
        raise ValueError(f"gpu: is needed for {metric.key}, got None. Pass the GPU to draw.")
    return f"{Stream.DEVICES.value}/{gpu.uuid}"


def _trace(
    key: str,
    style: str,
    *,
    gpu: Gpu | None = None,
    label: str | None = None,
    colour: str | None = None,
    axis: str = "y",
    dash: str = "solid",
) -> Json:
    """One line. Styles: ema (smoothed over faint raw), mean (over a faint envelope), envelope
    (minimum to maximum, for memory: a short peak must stay visible), points, context (dashed;
    it counts for the axis only at full scale)."""
    return {
        "series": series_of(BY_KEY[key], gpu),
        "metric": key,
        "label": label or BY_KEY[key].label,
        "style": style,
        "colour": colour or _COLOURS[key],
        "axis": axis,
        "dash": "dash" if style == "context" else dash,
    }


def _axis(unit: Unit, *, fixed: tuple[float, float] | None = None, zero: bool = True) -> Json:
    return {"unit": unit.value, "range": list(fixed) if fixed else None, "zero": zero}


def _chart(
    chart_id: str,
    title: str,
    traces: list[Json],
    *,
    kind: str = "lines",
    y: Json | None = None,
    y2: Json | None = None,
    note: str | None = None,
    loss: bool = False,
    warm_up: int = 0,
) -> Json:
    return {
        "id": chart_id,
        "title": title,
        "kind": kind,
        "y": y or _axis(Unit.NONE, zero=False),
        "y2": y2,
        "traces": traces,
        "note": note,
        "loss": loss,
        "warm_up": warm_up,
    }


def _loss() -> Json:
    traces = [
        _trace("train/loss", "ema", label="train"),
        _trace("val/loss", "points", label="validation"),
    ]
    return _chart("loss", "Loss", traces, loss=True)


def _memory(facts: RunFacts) -> Json:
    if not facts.has_cuda:
        traces = [_trace(key, "envelope") for key in ("process/rss", "process/peak_rss")]
        traces.append(_trace("host/mem_used", "context"))
        reason = f"On the CPU: {facts.allocator_reason}"
        return _chart("memory", "Memory", traces, y=_axis(Unit.BYTES), note=reason)
    keys = ("memory/allocated", "memory/reserved", "memory/peak_allocated")
    traces = [_trace(key, "envelope") for key in keys]
    for gpu, suffix, colour in _numbered(facts.gpus):
        used = _trace(
            "gpu/mem_used", "envelope", gpu=gpu, label=f"device used{suffix}", colour=colour
        )
        traces.append(used)
    training = _training_gpu(facts)
    if training is not None:
        traces.append(_trace("gpu/mem_total", "context", gpu=training, label="total"))
    note = None if facts.gpus else f"Device used and total are not known: {facts.gpu_reason}"
    return _chart("memory", "Memory", traces, y=_axis(Unit.BYTES), note=note)


def _utilisation(facts: RunFacts) -> Json:
    traces: list[Json] = []
    for gpu, suffix, colour in _numbered(facts.gpus):
        traces.append(_trace("gpu/util", "mean", gpu=gpu, label=f"GPU{suffix}", colour=colour))
        if len(facts.gpus) == 1:  # one line a GPU stays readable with eight of them
            traces.append(_trace("gpu/mem_util", "mean", gpu=gpu, dash="dot"))
    if traces:
        y = _axis(Unit.PERCENT, fixed=(0.0, 100.0))
        return _chart("utilisation", "Utilisation", traces, y=y)
    traces = [_trace("process/cpu", "mean"), _trace("host/cpu", "mean")]
    note = (
        "Process CPU: 100 % is one core. No GPU utilisation, power or temperature: "
        f"{facts.gpu_reason}"
    )
    return _chart("utilisation", "Utilisation", traces, y=_axis(Unit.PERCENT), note=note)


def _power(facts: RunFacts) -> Json:
    traces: list[Json] = []
    for gpu, suffix, colour in _numbered(facts.gpus):
        traces.append(_trace("gpu/power", "mean", gpu=gpu, label=f"power{suffix}", colour=colour))
        temperature = _trace(
            "gpu/temp", "mean", gpu=gpu, label=f"temperature{suffix}", colour=colour, axis="y2",
            dash="dot",
        )  # fmt: skip
        traces.append(temperature)
    training = _training_gpu(facts)
    if training is not None:
        traces.append(_trace("gpu/power_limit", "context", gpu=training, label="limit"))
    y2 = _axis(Unit.CELSIUS, zero=False)
    return _chart("power", "Power and temperature", traces, y=_axis(Unit.WATT), y2=y2)


def _throughput() -> Json:
    traces = [_trace("perf/samples_per_sec", "mean")]
    return _chart("throughput", "Throughput", traces, y=_axis(Unit.PER_SECOND))


def _step_time() -> Json:
    traces = [_trace("perf/step_time", "mean"), _trace("perf/data_wait", "mean")]
    return _chart("step_time", "Step time", traces, y=_axis(Unit.SECOND), warm_up=WARM_UP_ROWS)


def _kpis(facts: RunFacts) -> list[Json]:
    gpu = _training_gpu(facts)
    tiles = [
        {"id": "step", "label": "Step", "special": "step"},
        {"id": "epoch", "label": "Epoch", "special": "epoch"},
        _tile("loss", "Loss", "train/loss") | {"also": ["val/loss", "val/accuracy"]},
        _tile("samples_per_sec", "Samples/s", "perf/samples_per_sec"),
    ]
    if facts.has_cuda:
        total = _device_total(gpu)
        tiles += [
            _tile("allocated", "Allocated", "memory/allocated") | total,
            _tile("reserved", "Reserved", "memory/reserved") | total,
            _tile("peak", "Peak allocated", "memory/peak_allocated") | total,
        ]
    else:
        host = {"of": {"series": Stream.SAMPLES.value, "metric": "host/mem_total"}}
        tiles += [
            _tile("process_memory", "Process memory", "process/rss") | host,
            _tile("peak_process_memory", "Peak process memory", "process/peak_rss") | host,
        ]
    reason = f"GPU values do not exist here: {facts.gpu_reason}"
    for tile_id, label, key in (
        ("gpu_util", "GPU utilisation", "gpu/util"),
        ("temperature", "Temperature", "gpu/temp"),
        ("power", "Power", "gpu/power"),
    ):
        tiles.append(_tile(tile_id, label, key, gpu=gpu, reason=reason))
    tiles.append({"id": "eta", "label": "Time left", "special": "eta"})
    return tiles


def _tile(
    tile_id: str, label: str, key: str, *, gpu: Gpu | None = None, reason: str | None = None
) -> Json:
    metric = BY_KEY[key]
    exists = metric.stream is not Stream.DEVICES or gpu is not None
    return {
        "id": tile_id,
        "label": label,
        "series": series_of(metric, gpu) if exists else None,
        "metric": key,
        "unit": metric.unit.value,
        "colour": _COLOURS[key],
        "title": metric.meaning,
        "reason": None if exists else reason,
    }


def _device_total(gpu: Gpu | None) -> Json:
    if gpu is None:
        return {}
    series = series_of(BY_KEY["gpu/mem_total"], gpu)
    return {"of": {"series": series, "metric": "gpu/mem_total", "value": gpu.memory_bytes}}


def _training_gpu(facts: RunFacts) -> Gpu | None:
    named = (gpu for gpu in facts.gpus if gpu.uuid == facts.training_gpu)
    return next(named, facts.gpus[0] if facts.gpus else None)


def _numbered(gpus: tuple[Gpu, ...]) -> list[tuple[Gpu, str, str | None]]:
    """Each GPU with a label suffix and a colour; one GPU alone keeps the metrics' own colours."""
    if len(gpus) == 1:
        return [(gpus[0], "", None)]
    return [
        (gpu, f" {index}", _GPU_COLOURS[index % len(_GPU_COLOURS)])
        for index, gpu in enumerate(gpus)
    ]


def _fit(fit: Fit | None) -> Json | None:
    if fit is None:
        return None
    return {
        "x": list(fit.x),
        "y": list(fit.y),
        "slope": fit.slope,
        "intercept": fit.intercept,
        "series": Stream.STEPS.value,
        "weight": "model/weight",
        "bias": "model/bias",
    }
