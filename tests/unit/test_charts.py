"""The layout names only metrics and series that exist, and says why what is missing is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dashboard.charts.layout import layout
from dashboard.charts.run_view import NO_ALLOCATOR, RunView, SampledGpu
from stepscope.common.metrics import BY_KEY, Stream
from stepscope.run import RunKind

CPU = RunView(
    has_cuda=False, gpu_reason="no NVIDIA driver is installed.", allocator_reason=NO_ALLOCATOR
)
H100 = SampledGpu(uuid="GPU-1", name="NVIDIA H100", memory_bytes=80 * 2**30)
CUDA = RunView(has_cuda=True, gpus=(H100,), training_gpu="GPU-1")
WATCHED = RunView(
    has_cuda=True,
    gpus=(H100,),
    training_gpu="GPU-1",
    kind=RunKind.WATCH,
    optimizers=("Adam", "SGD"),
    custom=("train/d_real", "val/f1"),
    custom_left=3,
)
EIGHT = tuple(
    SampledGpu(uuid=f"GPU-{n}", name="A100", index=n, memory_bytes=40 * 2**30) for n in range(8)
)


def chart(made: dict[str, Any], chart_id: str) -> dict[str, Any]:
    return next(entry for entry in made["charts"] if entry["id"] == chart_id)


def metrics(entry: dict[str, Any]) -> list[str]:
    return [trace["metric"] for trace in entry["traces"]]


@pytest.mark.parametrize("content", [CPU, CUDA, WATCHED])
def test_every_trace_and_tile_names_a_known_metric_in_its_stream(content: RunView) -> None:
    made = layout(content)
    named = [trace for entry in made["charts"] for trace in entry["traces"]]
    for tile in made["kpis"]:
        named += [tile | {"series": name} for name in tile["series"]]
    assert len(named) > len(made["kpis"])
    ids = [entry["id"] for entry in made["charts"]]
    assert len(set(ids)) == len(ids)
    for entry in named:
        metric = BY_KEY.get(entry["metric"])
        # What only this run has comes from its steps.
        assert entry["series"].split("/")[0] == (metric.stream if metric else Stream.STEPS)
        assert entry["metric"] in made["metrics"]
    assert json.loads(json.dumps(made)) == made
    assert set(BY_KEY) <= set(made["metrics"])


def test_a_cpu_run_draws_no_gpu_and_says_once_why() -> None:
    made = layout(CPU)
    assert "memory/allocated" not in metrics(chart(made, "memory"))
    assert "power" not in [entry["id"] for entry in made["charts"]]
    text = json.dumps(made)
    for said in ("no NVIDIA driver", "allocated and reserved memory on CUDA devices only"):
        assert said in made["absent"]
        assert text.count(said) == 1


def test_what_a_gpu_does_not_give_is_said_once_with_its_reason() -> None:
    lacks = {"gpu/util": "not available with MIG enabled", "gpu/energy": "permission"}
    gpu = SampledGpu(uuid="MIG-1", name="H100", missing=lacks | {"gpu/mem_util": lacks["gpu/util"]})
    made = layout(RunView(has_cuda=True, gpus=(gpu,), training_gpu="MIG-1"))
    assert made["absent"] == (
        "GPU utilization, memory access: not available with MIG enabled."
    )  # the energy counter is in no chart
    hidden = {tile["id"]: tile["hide"] for tile in made["kpis"]}
    assert (hidden["gpu_util"], hidden["power"], hidden["loss"]) == (True, False, False)


def test_a_reason_that_only_some_gpus_have_names_them() -> None:
    gpus = (
        EIGHT[0],
        SampledGpu(uuid="GPU-x", name="A100", index=1, missing={"gpu/power": "lost."}),
    )
    made = layout(RunView(has_cuda=True, gpus=gpus, training_gpu="GPU-0"))
    assert made["absent"] == "Power of GPU 1: lost."


def test_tiles_have_the_gpus_that_the_run_trains_on() -> None:
    """The mean of a script on one GPU of three was that of all, two of which were idle."""
    content = RunView(has_cuda=True, gpus=EIGHT[:3], training_gpu="GPU-2", kind=RunKind.WATCH)
    for used in ({"GPU-2"}, {"GPU-0", "GPU-2"}):
        made = layout(replace(content, used_gpus=frozenset(used)))
        tile = next(one for one in made["kpis"] if one["id"] == "power")
        assert tile["series"] == [f"devices/{uuid}" for uuid in sorted(used)]
        labels = [trace["label"] for trace in chart(made, "utilization")["traces"]]
        assert labels == ["GPU 0", "GPU 1", "GPU 2"]


def test_the_memory_chart_has_the_training_gpu_and_another_chart_all_of_them() -> None:
    made = layout(RunView(has_cuda=True, gpus=EIGHT, training_gpu="GPU-2"))
    drawn = {name: chart(made, name)["traces"] for name in ("memory", "gpu_memory")}
    used = {
        name: [line["series"] for line in lines if line["metric"] == "gpu/mem_used"]
        for name, lines in drawn.items()
    }
    assert used == {
        "memory": ["devices/GPU-2"],
        "gpu_memory": [f"devices/{gpu.uuid}" for gpu in EIGHT],
    }


def test_the_samples_of_a_distributed_run_are_of_all_ranks() -> None:
    """The tiles of a job of 4 ranks showed the samples/s of rank 0."""
    tiles = {tile["id"]: tile for tile in layout(replace(CUDA, ranks=4))["kpis"]}
    assert tiles["samples_per_sec"]["scale"] == 4


def test_the_scripts_own_metrics_and_each_optimizers_loss_are_drawn() -> None:
    made = layout(WATCHED)
    losses = ["train/loss", "train/loss.optimizer1", "val/loss"]
    assert metrics(chart(made, "loss")) == losses
    assert len(chart(made, "learning_rate")["traces"]) == 16
    own = [entry for entry in made["charts"] if entry["group"] == "custom"]
    assert [entry["title"] for entry in own] == ["d_real", "val/f1"]
    assert made["custom_note"].startswith("3 more metrics are recorded but not charted;")


def test_flops_and_their_share_of_the_peak_have_an_axis_each() -> None:
    flops = chart(layout(CUDA), "flops")
    axes = {line["metric"]: line["axis"] for line in flops["traces"]}
    assert axes == {"perf/tflops": "y", "perf/mfu": "y2"}
    unknown = replace(CUDA, flops_reason="Not counted: x.", peak_reason="No share of a peak: y.")
    flops = chart(layout(unknown), "flops")
    assert (flops["empty"], flops["y2"]) == ("Not counted: x.", None)
    assert flops["note"] == "No share of a peak: y."
    (line,) = flops["traces"]
    assert not line["optional"], "the chart stays, with its reason"
