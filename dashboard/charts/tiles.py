"""The number tiles of a run, as JSON for the live chart component; pure."""

from __future__ import annotations

from dashboard.charts.content import Gpu, RunContent
from dashboard.charts.parts import COLORS, Json, color_of, numbered, series_of, training_gpu
from stepscope.metrics import BY_KEY, Stream
from stepscope.run import RunKind

GPUS_IN_TILES = 4
NO_SAMPLES = {
    RunKind.WATCH: "Not known: samples are counted where batches come from a torch DataLoader.",
    RunKind.INIT: "Not known: give each step its samples=, or take batches from rec.batches().",
}
NO_EPOCH = {
    RunKind.WATCH: "Not known: epochs are counted where batches come from a torch DataLoader.",
    RunKind.INIT: "Not known: the script has not set rec.epoch.",
}
HOST_TOTAL = {"of": {"series": Stream.SAMPLES.value, "metric": "host/mem_total"}}


def tiles(content: RunContent) -> list[Json]:
    """Return the tiles in their order on the page."""
    if content.kind is RunKind.RECORD:
        return _machine(content)
    made: list[Json] = [
        {"id": "step", "label": "Step", "special": "step"},
        {"id": "epoch", "label": "Epoch", "special": "epoch", "reason": NO_EPOCH.get(content.kind)},
        _tile("loss", "Loss", "train/loss") | {"also": ["val/loss", "val/accuracy"]},
        _tile(
            "samples_per_sec",
            "Samples/s",
            "perf/samples_per_sec",
            unknown=NO_SAMPLES.get(content.kind),
        ),
        *_memory(content),
        *_gpu(content),
    ]
    if content.has_total:
        made.append({"id": "eta", "label": "Time left", "special": "eta"})
    return made


def _memory(content: RunContent) -> list[Json]:
    if content.has_cuda:
        total = _device_total(training_gpu(content))
        return [
            _tile("allocated", "Allocated", "memory/allocated") | total,
            _tile("reserved", "Reserved", "memory/reserved") | total,
            _tile("peak", "Peak allocated", "memory/peak_allocated") | total,
        ]
    return [
        _tile("process_memory", "Process memory", "process/rss") | HOST_TOTAL,
        _tile("peak_process_memory", "Peak process memory", "process/peak_rss") | HOST_TOTAL,
    ]


def _gpu(content: RunContent) -> list[Json]:
    gpu = training_gpu(content)
    reason = f"GPU values do not exist here: {content.gpu_reason}"
    return [
        _tile(tile_id, label, key, gpu=gpu, color=color_of(gpu, content), reason=reason)
        for tile_id, label, key in (
            ("gpu_util", "GPU utilization", "gpu/util"),
            ("temperature", "Temperature", "gpu/temp"),
            ("power", "Power", "gpu/power"),
        )
    ]


def _machine(content: RunContent) -> list[Json]:
    """The tiles of a recording: each GPU while they are few, and the host."""
    made: list[Json] = []
    for gpu, suffix, color in numbered(content.gpus)[:GPUS_IN_TILES]:
        tag = suffix.strip()
        made += [
            _tile(f"gpu_util{tag}", f"GPU{suffix} utilization", "gpu/util", gpu=gpu, color=color),
            _tile(f"gpu_memory{tag}", f"GPU{suffix} memory", "gpu/mem_used", gpu=gpu, color=color)
            | _device_total(gpu),
        ]
    if len(content.gpus) == 1:
        made += _gpu(content)[1:]
    elif not content.gpus:
        made += _gpu(content)[:1]
    return [
        *made,
        _tile("host_cpu", "Host CPU", "host/cpu"),
        _tile("host_memory", "Host memory", "host/mem_used") | HOST_TOTAL,
    ]


def _tile(
    tile_id: str,
    label: str,
    key: str,
    *,
    gpu: Gpu | None = None,
    color: str | None = None,
    reason: str | None = None,
    unknown: str | None = None,
) -> Json:
    """A tile. `color` is its GPU's among several; `reason` says why its GPU does not exist,
    `unknown` why a value may never come."""
    metric = BY_KEY[key]
    exists = metric.stream is not Stream.DEVICES or gpu is not None
    return {
        "id": tile_id,
        "label": label,
        "series": series_of(metric, gpu) if exists else None,
        "metric": key,
        "unit": metric.unit.value,
        "color": color or COLORS[key],
        "title": metric.meaning,
        "reason": unknown if exists else reason,
    }


def _device_total(gpu: Gpu | None) -> Json:
    if gpu is None:
        return {}
    series = series_of(BY_KEY["gpu/mem_total"], gpu)
    return {"of": {"series": series, "metric": "gpu/mem_total", "value": gpu.memory_bytes}}
