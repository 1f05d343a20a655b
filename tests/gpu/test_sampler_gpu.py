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
from stepscope.gpu.nvml_queries import FIELDS, FieldValueReader, QueryReader, SamplingTier
from stepscope.gpu.source import DeviceSource, open_source
from trainer.devices import gpu_uuid

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
    asked = {key for entry in FIELDS for key in entry.keys}
    resting = {key for entry in FIELDS if entry.rest_s for key in entry.keys}
    assert set(values) | set(report["reasons"]) | resting == asked | set(SHARES)
    total = torch.cuda.get_device_properties(0).total_memory
    assert values["gpu/mem_total"] == pytest.approx(total, rel=0.1)


@pytest.mark.alone
def test_every_call_and_its_latency(gpu: Gpu, report: dict[str, Any]) -> None:
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    report["latency_us"] = {
        name: latency_us(call, handle)
        for entry in FIELDS
        for name, call in map(named, entry.readers)
    }
    fast_us = [timed(lambda: gpu.source.read(gpu.uuid, SamplingTier.FAST)) for _ in range(CALLS)]
    report["fast_tier_us"] = summary(fast_us)  # from 5 ms on the sampler halves its rate
    answered = {name for name, found in report["latency_us"].items() if isinstance(found, dict)}
    assert answered, report["latency_us"]


def named(reader: QueryReader) -> tuple[str, Callable[[Any], Any]]:
    """Return a reader's name and its call; of a field value that of nvmlDeviceGetFieldValues."""
    if not isinstance(reader, FieldValueReader):
        return reader.__name__, reader
    number = reader.id_for(999) or 0

    def read(handle: Any) -> None:
        (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [(number, reader.scope)])
        if answer.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(answer.nvmlReturn)

    return f"field {number}", read


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
