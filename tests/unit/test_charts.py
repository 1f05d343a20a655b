"""The layout names only metrics and series that exist, and says why what is missing is missing."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from dashboard.charts import Fit, Gpu, RunFacts, layout, series_of
from stepscope.metrics import BY_KEY, Stream

CPU = RunFacts(has_cuda=False, gpu_reason="no NVIDIA driver is installed.")
H100 = Gpu(uuid="GPU-1", name="NVIDIA H100", memory_bytes=80 * 2**30)
CUDA = RunFacts(has_cuda=True, gpus=(H100,), training_gpu="GPU-1")
FIT = Fit(x=(0.0, 1.0), y=(1.0, 3.0), slope=2.0, intercept=1.0)


def chart(made: dict[str, Any], chart_id: str) -> dict[str, Any]:
    return next(entry for entry in made["charts"] if entry["id"] == chart_id)


def metrics(entry: dict[str, Any]) -> list[str]:
    return [trace["metric"] for trace in entry["traces"]]


@pytest.mark.parametrize("facts", [CPU, CUDA])
def test_every_trace_and_tile_names_a_known_metric_in_its_stream(facts: RunFacts) -> None:
    made = layout(facts)
    named = [trace for entry in made["charts"] for trace in entry["traces"]]
    named += [tile for tile in made["kpis"] if "special" not in tile and tile["series"]]
    for entry in named:
        stream = BY_KEY[entry["metric"]].stream
        assert entry["series"].split("/")[0] == stream.value
    assert json.loads(json.dumps(made)) == made
    assert set(made["metrics"]) == set(BY_KEY)


def test_a_cuda_run_shows_the_allocator_and_the_device_total() -> None:
    memory = chart(layout(CUDA), "memory")
    assert metrics(memory) == [
        "memory/allocated", "memory/reserved", "memory/peak_allocated", "gpu/mem_used",
        "gpu/mem_total",
    ]  # fmt: skip
    assert memory["note"] is None
    tiles = {tile["id"]: tile for tile in layout(CUDA)["kpis"]}
    assert tiles["allocated"]["of"]["value"] == 80 * 2**30
    assert tiles["gpu_util"]["series"] == "devices/GPU-1"


def test_a_cpu_run_says_why_allocated_and_gpu_values_do_not_exist() -> None:
    made = layout(CPU)
    assert "memory/allocated" not in metrics(chart(made, "memory"))
    assert "CUDA allocator" in chart(made, "memory")["note"]
    assert "power" not in [entry["id"] for entry in made["charts"]]
    assert "power or temperature: no NVIDIA driver" in chart(made, "utilisation")["note"]
    tiles = {tile["id"]: tile for tile in made["kpis"]}
    assert tiles["gpu_util"]["series"] is None
    assert "no NVIDIA driver" in tiles["gpu_util"]["reason"]
    assert "process_memory" in tiles
    assert "allocated" not in tiles


def test_cuda_without_nvml_keeps_the_allocator_and_explains_the_rest() -> None:
    made = layout(RunFacts(has_cuda=True, gpu_reason="NVML is not installed."))
    memory = chart(made, "memory")
    assert metrics(memory)[0] == "memory/allocated"
    assert "NVML is not installed" in memory["note"]
    assert "NVML is not installed" in chart(made, "utilisation")["note"]


def test_several_gpus_get_a_numbered_trace_and_a_colour_each() -> None:
    gpus = tuple(Gpu(uuid=f"GPU-{index}", name="A100") for index in range(3))
    made = layout(RunFacts(has_cuda=True, gpus=gpus, training_gpu="GPU-2"))
    util = [t for t in chart(made, "utilisation")["traces"] if t["metric"] == "gpu/util"]
    assert [trace["label"] for trace in util] == ["GPU 0", "GPU 1", "GPU 2"]
    assert len({trace["colour"] for trace in util}) == 3
    tiles = {tile["id"]: tile for tile in made["kpis"]}
    assert tiles["power"]["series"] == "devices/GPU-2"


def test_a_metric_has_one_colour_wherever_it_is_shown() -> None:
    made = layout(CUDA)
    seen: dict[str, str] = {}
    shown = [trace for entry in made["charts"] for trace in entry["traces"]]
    for entry in shown + [tile for tile in made["kpis"] if "colour" in tile]:
        assert seen.setdefault(entry["metric"], entry["colour"]) == entry["colour"]


def test_the_linear_workload_adds_the_fit_chart() -> None:
    made = layout(RunFacts(has_cuda=False, fit=FIT))
    assert chart(made, "fit")["kind"] == "fit"
    assert made["fit"]["slope"] == 2.0
    assert all(entry["id"] != "fit" for entry in layout(CPU)["charts"])
    assert layout(CPU)["fit"] is None


def test_chart_ids_are_unique() -> None:
    ids = sorted(entry["id"] for entry in layout(CUDA)["charts"])
    assert all(first != second for first, second in pairwise(ids))


def test_a_device_series_needs_its_gpu() -> None:
    assert series_of(BY_KEY["train/loss"]) == Stream.STEPS.value
    with pytest.raises(ValueError, match="gpu: is needed for gpu/util"):
        series_of(BY_KEY["gpu/util"])
