"""On a real GPU: torch's and NVML's bytes, and the time that each call takes.

What was measured is written as JSON to the path in STEPSCOPE_GPU_REPORT, if that is set.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
import torch

from stepscope.gpu.gpm import SHARES
from stepscope.gpu.nvml_queries import KEYS, QUERIES, SamplingTier
from stepscope.gpu.source import DeviceSource, open_source
from trainer.training.devices import gpu_uuid

CALLS = 300


@dataclass(frozen=True)
class Gpu:
    """Torch's device 0 and its NVML counterpart."""

    uuid: str
    source: DeviceSource


@pytest.fixture
def gpu(need: Callable[[str | None], None]) -> Gpu:
    # One of its own: where calls are slow, the one of an earlier test leaves some out for a while.
    source = open_source(reader=f"test {time.monotonic_ns()}")
    need(source.reason)
    torch.zeros(1, device="cuda:0")  # the context's own memory is not part of what is measured
    gpu = Gpu(gpu_uuid(0), source)
    source.read(gpu.uuid, *SamplingTier)  # so that `reasons` knows what this GPU lacks
    return gpu


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"torch": torch.__version__}
    yield found
    path = os.environ.get("STEPSCOPE_GPU_REPORT")
    if path:
        Path(path).write_text(json.dumps(found, indent=1), encoding="utf-8")


def test_torchs_device_is_found_by_uuid(gpu: Gpu, report: dict[str, Any]) -> None:
    values = gpu.source.read(gpu.uuid, *SamplingTier)
    report["device"] = next(asdict(i) for i in gpu.source.devices() if i.uuid == gpu.uuid)
    report["values"] = values
    report["reasons"] = gpu.source.reasons(gpu.uuid)
    resting = {key for query in QUERIES if query.period_s for key in query.metrics}
    assert values.keys() | report["reasons"].keys() | resting == KEYS | set(SHARES)
    total = torch.cuda.get_device_properties(0).total_memory
    assert values["gpu/mem_total"] == pytest.approx(total, rel=0.1)


@pytest.mark.alone
def test_every_call_and_its_latency(gpu: Gpu, report: dict[str, Any]) -> None:
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    report["latency_us"] = {
        f"{', '.join(query.metrics)}, call {number}": latency_us(call, handle)
        for query in QUERIES
        for number, call in enumerate(query.calls)
    }
    fast_us = [timed(lambda: gpu.source.read(gpu.uuid, SamplingTier.FAST)) for _ in range(CALLS)]
    report["fast_tier_us"] = summary(fast_us)
    answered = {name for name, found in report["latency_us"].items() if isinstance(found, dict)}
    assert answered, report["latency_us"]


def latency_us(reader: Callable[[Any], Any], handle: Any) -> dict[str, float] | str:
    try:
        reader(handle)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        return str(error)
    return summary([timed(lambda: reader(handle)) for _ in range(CALLS)])


def timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begun)


def summary(values: Any) -> dict[str, float]:
    mean, p50, p99 = np.mean(values), np.percentile(values, 50), np.percentile(values, 99)
    return {"mean": float(mean), "p50": float(p50), "p99": float(p99), "max": float(max(values))}
