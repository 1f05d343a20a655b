"""run.json becomes what the page draws, whoever wrote it and whatever is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dashboard.charts.layout import layout
from dashboard.charts.run_view import (
    MAX_CUSTOM_CHARTS,
    NOT_BEGUN,
    RunView,
    custom_metrics,
    run_content,
)
from stepscope.run import RunInfo, RunKind, RunStatus

GPU = {"uuid": "GPU-1", "name": "NVIDIA H100", "memory_total": 80 * 2**30}


def content(status: RunStatus = RunStatus.RUNNING, **given: Any) -> RunView:
    return run_content(RunInfo(Path("run"), status, None, 0.0, {"created": 0.0, **given}))


def test_the_device_is_the_configured_or_the_described_one() -> None:
    trainer = content(config={"device": "GPU-1"}, devices=[GPU])
    script = content(kind="watch", device="GPU-1", devices=[GPU], config={"device": "cpu"})
    for found, kind in ((trainer, RunKind.TRAINER), (script, RunKind.WATCH)):
        assert (found.kind, found.has_cuda, found.training_gpu) == (kind, True, "GPU-1")
    assert not content(config={}).has_cuda
    pending = content(RunStatus.PENDING, kind="watch", devices=[GPU])
    assert (pending.allocator_reason, pending.has_cuda) == (NOT_BEGUN, False)
    assert len(pending.gpus) == 1  # what the machine does is of interest already
    on_cpu = content(kind="watch", device="cpu", devices=[GPU])
    assert on_cpu.gpus == ()
    assert "trains on the CPU" in on_cpu.gpu_reason


def test_a_cuda_run_without_an_allocator_says_why() -> None:
    why = {"allocator": "CUDA has not been started in this process"}
    found = content(kind="watch", device="GPU-1", devices=[GPU], capabilities=why)
    assert why["allocator"] in layout(found)["absent"]


def test_each_gpu_says_what_it_does_not_give() -> None:
    mig = {"uuid": "MIG-1", "name": "NVIDIA H200 MIG 1g.18gb"}
    lacks = {"gpu/util": "not supported on this GPU", "gpu/power": "permission"}
    missing = {"GPU-1": {"gpu/temp": "not supported on this GPU"}, "MIG-1": lacks}
    found = content(kind="watch", devices=[GPU, mig], capabilities={"missing": missing})
    assert {gpu.index: gpu.missing for gpu in found.gpus} == {0: missing["GPU-1"], 1: lacks}


def test_metrics_of_the_scripts_own_are_bounded_and_those_of_the_table_are_none() -> None:
    keys = [f"train/m{n}" for n in range(30)]
    drawn, left = custom_metrics({"custom": ["perf/step_time", *keys, "x" * 500]})
    assert drawn == tuple(keys[:MAX_CUSTOM_CHARTS])
    assert left == 30 - MAX_CUSTOM_CHARTS + 1


@pytest.mark.parametrize("junk", [None, 1, "x", [1, None], {"a": 1}, [["x"]]])
def test_what_others_wrote_cannot_break_the_page(junk: Any) -> None:
    lacks = dict.fromkeys(("missing", "collectives", "allocator", "nvml"), junk)
    assert layout(content(kind="none", config={"device": junk}, capabilities=lacks))["charts"]
    gpu = {**GPU, "memory_total": junk}
    odd = content(kind="watch", devices=[gpu], capabilities={"missing": {"GPU-1": junk}})
    assert layout(odd)["charts"]
