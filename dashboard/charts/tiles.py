"""The tiles of a run as JSON for the live chart component. No I/O."""

from __future__ import annotations

from dashboard.charts.chart_spec import COLORS, Json, series_of, training_gpu
from dashboard.charts.run_view import RunView, SampledGpu
from stepscope.metrics import BY_KEY, Stream, Unit
from stepscope.run import RunKind

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
    "gpu/mem_used": ("gpu_memory", "GPU memory", "Mean GPU memory"),
    "gpu/power": ("power", "Power", "Mean power"),
    "gpu/temp": ("temperature", "Temperature", "Mean temperature"),
}


def tiles(content: RunView) -> list[Json]:
    """Return the tiles; samples/s of a job assumes equal batch sizes of all ranks."""
    if content.kind is RunKind.RECORD:
        return [*_gpus(content, content.gpus, *GPU_TILES), *_host()]
    rate: Json = {"reason": NO_SAMPLES.get(content.kind), "scale": content.ranks}
    if content.samples_per_s is not None:
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
    return [*of_rank, *_gpus(content, used or content.gpus, "gpu/util", "gpu/power")]


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


def _host() -> list[Json]:
    return [
        _tile("host_cpu", "Host CPU", "host/cpu"),
        _tile("host_memory", "Host memory", "host/mem_used") | _host_total(),
    ]


def _gpus(content: RunView, gpus: tuple[SampledGpu, ...], *keys: str) -> list[Json]:
    made = []
    for key in keys if gpus else ():
        tile_id, one, several = GPU_TILES[key]
        label = one if len(gpus) == 1 else several
        if len(gpus) == 1 < len(content.gpus):
            label = f"{one}, GPU {gpus[0].index}"
        made.append(_tile(tile_id, label, key, gpus))
        if key == "gpu/mem_used" and len({gpu.memory_bytes for gpu in gpus}) == 1:
            made[-1] |= _device_total(gpus[0])
    return made


def _tile(tile_id: str, label: str, key: str, gpus: tuple[SampledGpu, ...] = ()) -> Json:
    """Return a tile with the newest value of its series, or mean and range of several series.

    `ended`: the value shown after the run: mean, peak (memory) or last (loss); `whole`: its median
    after the warm-up, shown instead of the mean. `reason`: why a value may be missing. `hide`: no
    tile until a value exists.
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
