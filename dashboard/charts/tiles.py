"""The number tiles of a run, as JSON for the live chart component; pure."""

from __future__ import annotations

from dashboard.charts.facts import Gpu, RunFacts
from dashboard.charts.parts import COLOURS, Json, colour_of, numbered, series_of, training_gpu
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


def tiles(facts: RunFacts) -> list[Json]:
    """Return the tiles in their order on the page."""
    if facts.kind is RunKind.RECORD:
        return _machine(facts)
    made: list[Json] = [
        {"id": "step", "label": "Step", "special": "step"},
        {"id": "epoch", "label": "Epoch", "special": "epoch", "reason": NO_EPOCH.get(facts.kind)},
        _tile("loss", "Loss", "train/loss") | {"also": ["val/loss", "val/accuracy"]},
        _tile(
            "samples_per_sec",
            "Samples/s",
            "perf/samples_per_sec",
            unknown=NO_SAMPLES.get(facts.kind),
        ),
        *_memory(facts),
        *_gpu(facts),
    ]
    if facts.has_total:
        made.append({"id": "eta", "label": "Time left", "special": "eta"})
    return made


def _memory(facts: RunFacts) -> list[Json]:
    if facts.has_cuda:
        total = _device_total(training_gpu(facts))
        return [
            _tile("allocated", "Allocated", "memory/allocated") | total,
            _tile("reserved", "Reserved", "memory/reserved") | total,
            _tile("peak", "Peak allocated", "memory/peak_allocated") | total,
        ]
    return [
        _tile("process_memory", "Process memory", "process/rss") | HOST_TOTAL,
        _tile("peak_process_memory", "Peak process memory", "process/peak_rss") | HOST_TOTAL,
    ]


def _gpu(facts: RunFacts) -> list[Json]:
    gpu = training_gpu(facts)
    reason = f"GPU values do not exist here: {facts.gpu_reason}"
    return [
        _tile(tile_id, label, key, gpu=gpu, colour=colour_of(gpu, facts), reason=reason)
        for tile_id, label, key in (
            ("gpu_util", "GPU utilisation", "gpu/util"),
            ("temperature", "Temperature", "gpu/temp"),
            ("power", "Power", "gpu/power"),
        )
    ]


def _machine(facts: RunFacts) -> list[Json]:
    """The tiles of a recording: each GPU while they are few, and the host."""
    made: list[Json] = []
    for gpu, suffix, colour in numbered(facts.gpus)[:GPUS_IN_TILES]:
        tag = suffix.strip()
        made += [
            _tile(f"gpu_util{tag}", f"GPU{suffix} utilisation", "gpu/util", gpu=gpu, colour=colour),
            _tile(f"gpu_memory{tag}", f"GPU{suffix} memory", "gpu/mem_used", gpu=gpu, colour=colour)
            | _device_total(gpu),
        ]
    if len(facts.gpus) == 1:
        made += _gpu(facts)[1:]
    elif not facts.gpus:
        made += _gpu(facts)[:1]
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
    colour: str | None = None,
    reason: str | None = None,
    unknown: str | None = None,
) -> Json:
    """A tile. `colour` is its GPU's among several; `reason` says why its GPU does not exist,
    `unknown` why a value may never come."""
    metric = BY_KEY[key]
    exists = metric.stream is not Stream.DEVICES or gpu is not None
    return {
        "id": tile_id,
        "label": label,
        "series": series_of(metric, gpu) if exists else None,
        "metric": key,
        "unit": metric.unit.value,
        "colour": colour or COLOURS[key],
        "title": metric.meaning,
        "reason": unknown if exists else reason,
    }


def _device_total(gpu: Gpu | None) -> Json:
    if gpu is None:
        return {}
    series = series_of(BY_KEY["gpu/mem_total"], gpu)
    return {"of": {"series": series, "metric": "gpu/mem_total", "value": gpu.memory_bytes}}
