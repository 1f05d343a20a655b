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
RECORD = RunView(has_cuda=False, gpus=(H100,), kind=RunKind.RECORD)
EIGHT = tuple(
    SampledGpu(uuid=f"GPU-{n}", name="A100", index=n, memory_bytes=40 * 2**30) for n in range(8)
)


def chart(made: dict[str, Any], chart_id: str) -> dict[str, Any]:
    return next(entry for entry in made["charts"] if entry["id"] == chart_id)


def metrics(entry: dict[str, Any]) -> list[str]:
    return [trace["metric"] for trace in entry["traces"]]


@pytest.mark.parametrize("content", [CPU, CUDA, WATCHED, RECORD])
def test_every_trace_and_tile_names_a_known_metric_in_its_stream(content: RunView) -> None:
    made = layout(content)
    named = [trace for entry in made["charts"] for trace in entry["traces"]]
    for tile in made["kpis"]:
        named += [tile | {"series": name} for name in tile["series"]]
    assert len(named) > len(made["kpis"])
    ids = [entry["id"] for entry in made["charts"]]
    assert len(set(ids)) == len(ids)
    colors: dict[str, str] = {}
    for entry in named:
        metric = BY_KEY.get(entry["metric"])
        # What only this run has comes from its steps.
        assert entry["series"].split("/")[0] == (metric.stream if metric else Stream.STEPS)
        assert entry["metric"] in made["metrics"]
        if content is CUDA:
            assert colors.setdefault(entry["metric"], entry["color"]) == entry["color"]
    assert json.loads(json.dumps(made)) == made
    assert set(BY_KEY) <= set(made["metrics"])


def test_a_cuda_run_shows_the_allocator_and_the_device_total() -> None:
    memory = chart(layout(CUDA), "memory")
    assert metrics(memory) == [
        "memory/allocated",
        "memory/reserved",
        "memory/peak_allocated",
        "gpu/mem_used",
        "gpu/mem_total",
    ]
    assert layout(CUDA)["absent"] is None
    tiles = {tile["id"]: tile for tile in layout(CUDA)["kpis"]}
    assert tiles["allocated"]["of"]["value"] == 80 * 2**30
    assert tiles["gpu_util"]["series"] == ["devices/GPU-1"]
    wanted = {"loss", "samples_per_sec", "step_time", "allocated", "gpu_util", "power"}
    assert wanted <= set(tiles)
    assert len(tiles) <= 8, "one row at 1400 px"


def test_a_cpu_run_draws_no_gpu_and_says_once_why() -> None:
    made = layout(CPU)
    assert "memory/allocated" not in metrics(chart(made, "memory"))
    assert "power" not in [entry["id"] for entry in made["charts"]]
    tiles = {tile["id"] for tile in made["kpis"]}
    assert {"process_memory", "process_cpu"} <= tiles
    assert not {"allocated", "gpu_util", "power"} & tiles
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
    assert all(trace["optional"] for trace in chart(made, "utilization")["traces"])


def test_a_reason_that_only_some_gpus_have_names_them() -> None:
    gpus = (
        EIGHT[0],
        SampledGpu(uuid="GPU-x", name="A100", index=1, missing={"gpu/power": "lost."}),
    )
    made = layout(RunView(has_cuda=True, gpus=gpus, training_gpu="GPU-0"))
    assert made["absent"] == "Power of GPU 1: lost."
    assert not next(tile for tile in made["kpis"] if tile["id"] == "power")["hide"]


def test_several_gpus_get_a_numbered_trace_and_a_color_each() -> None:
    made = layout(RunView(has_cuda=True, gpus=EIGHT[:3], training_gpu="GPU-2"))
    utilization = chart(made, "utilization")
    assert utilization["kind"] == "lines"
    assert [trace["label"] for trace in utilization["traces"]] == ["GPU 0", "GPU 1", "GPU 2"]
    assert len({trace["color"] for trace in utilization["traces"]}) == 3
    tiles = {tile["id"]: tile["series"] for tile in made["kpis"]}
    assert tiles["gpu_util"] == tiles["power"] == [f"devices/GPU-{n}" for n in range(3)]


def test_tiles_have_the_gpus_that_the_run_trains_on() -> None:
    """The mean of a script on one GPU of three was that of all, two of which were idle."""
    content = RunView(has_cuda=True, gpus=EIGHT[:3], training_gpu="GPU-2", kind=RunKind.WATCH)
    for used, label in (({"GPU-2"}, "Power, GPU 2"), ({"GPU-0", "GPU-2"}, "Mean power")):
        made = layout(replace(content, used_gpus=frozenset(used)))
        tile = next(one for one in made["kpis"] if one["id"] == "power")
        assert tile["series"] == [f"devices/{uuid}" for uuid in sorted(used)]
        assert tile["label"] == label
        assert len(chart(made, "utilization")["traces"]) == 3


def test_tiles_of_a_distributed_run_name_their_ranks() -> None:
    """The tiles of a job of 4 ranks showed the samples/s of rank 0."""
    tiles = {tile["id"]: tile for tile in layout(replace(CUDA, ranks=4))["kpis"]}
    assert tiles["samples_per_sec"]["label"] == "Samples/s, all 4 ranks"
    assert tiles["samples_per_sec"]["scale"] == 4
    assert tiles["loss"]["label"] == "Loss, rank 0"
    assert layout(CUDA)["kpis"][0]["label"] == "Loss"


@pytest.mark.parametrize("kind", [RunKind.WATCH, RunKind.RECORD])
def test_from_four_gpus_on_a_strip_of_heat_takes_the_place_of_lines(kind: RunKind) -> None:
    for count, wanted in ((3, "lines"), (4, "heat"), (8, "heat")):
        gpus = EIGHT[:count]
        made = layout(RunView(has_cuda=True, gpus=gpus, training_gpu="GPU-1", kind=kind))
        assert {chart(made, name)["kind"] for name in ("utilization", "power")} == {wanted}
        for entry in made["charts"]:
            used = [trace["gpu"] for trace in entry["traces"] if trace["metric"] == "gpu/mem_used"]
            if entry["kind"] == "heat" and used:
                assert used == list(range(count))
            elif used and wanted == "heat":
                assert used == [1], "beside the allocator's lines, the GPU that it trains on"


def test_each_optimizer_has_a_loss_of_its_own_and_one_alone_no_name() -> None:
    loss = chart(layout(WATCHED), "loss")
    assert metrics(loss) == ["train/loss", "train/loss.optimizer1", "val/loss"]
    labels = [trace["label"] for trace in loss["traces"]]
    assert labels == ["train (Adam 0)", "train (SGD 1)", "validation"]
    assert len({trace["color"] for trace in loss["traces"]}) == 3
    assert [trace["label"] for trace in chart(layout(CPU), "loss")["traces"]][0] == "train"


def test_the_scripts_own_metrics_get_small_charts_after_the_others() -> None:
    made = layout(WATCHED)
    own = [entry for entry in made["charts"] if entry["group"] == "custom"]
    assert [entry["title"] for entry in own] == ["d_real", "val/f1"]
    groups = [entry["group"] for entry in made["charts"]]
    assert groups == sorted(groups, key=["main", "custom", "more"].index)
    assert made["custom_note"].startswith("3 more metrics are recorded but not charted;")
    assert layout(CPU)["custom_note"] is None
    assert all((made["no_epoch"], chart(made, "loss")["empty"]))


def test_the_first_screen_has_four_charts_and_the_others_are_folded_away() -> None:
    charts = layout(CUDA)["charts"]
    first = [entry["id"] for entry in charts if entry["group"] == "main"]
    assert first == ["loss", "memory", "utilization", "step_time"]
    folded = [entry["id"] for entry in charts if entry["group"] == "more"]
    assert folded == ["power", "throughput", "flops", "learning_rate", "grad_norm", "amp_scale"]


def test_learning_rates_are_named_by_optimizer_and_group() -> None:
    made = layout(WATCHED)
    for name in ("learning_rate", "grad_norm", "amp_scale"):
        assert all(trace["optional"] for trace in chart(made, name)["traces"])
    rates = {trace["metric"]: trace["label"] for trace in chart(made, "learning_rate")["traces"]}
    assert rates["train/lr.optimizer1"] == "SGD 1"
    assert rates["train/lr.group1"] == "Adam 0, group 1"
    assert len(rates) == 16


def test_a_recording_has_the_machine_and_no_training() -> None:
    made = layout(RECORD)
    ids = [entry["id"] for entry in made["charts"]]
    assert ids == ["utilization", "memory", "power", "host_memory", "host_cpu"]
    assert made["axis"] == "time"
    assert {entry["group"] for entry in made["charts"]} == {"main"}
    tiles = {tile["id"] for tile in made["kpis"]}
    wanted = {"gpu_util", "gpu_memory", "power", "temperature", "host_cpu", "host_memory"}
    assert tiles == wanted


def test_flops_and_their_share_of_the_peak_have_an_axis_each() -> None:
    flops = chart(layout(CUDA), "flops")
    drawn = {line["metric"]: (line["axis"], line["optional"]) for line in flops["traces"]}
    assert drawn == {"perf/tflops": ("y", True), "perf/mfu": ("y2", True)}
    assert (flops["group"], flops["y"]["unit"], flops["y2"]["unit"]) == ("more", "TFLOP/s", "%")
    unknown = replace(CUDA, flops_reason="Not counted: x.", peak_reason="No share of a peak: y.")
    flops = chart(layout(unknown), "flops")
    assert (flops["empty"], flops["y2"]) == ("Not counted: x.", None)
    assert flops["note"] == "No share of a peak: y."
    (line,) = flops["traces"]
    assert not line["optional"], "the chart stays, with its reason"
    assert all(entry["id"] != "flops" for entry in layout(WATCHED)["charts"])
