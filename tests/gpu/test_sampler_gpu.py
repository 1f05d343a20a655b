"""On a real GPU: torch's and NVML's bytes, energy told in two ways, and what each call costs.

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
from numpy.typing import NDArray

from stepscope.metrics import Stream
from stepscope.recording.recorder import Recorder
from stepscope.run import RunStatus
from stepscope.sampling import allocator
from stepscope.sampling.energy import energy_joules
from stepscope.sampling.nvml import DeviceSource, open_source
from stepscope.sampling.nvml_fields import FIELDS, Tier
from stepscope.sampling.sampler import Sampler
from stepscope.store.reader import RunReader
from tests.gpu.conftest import SIMULATED
from trainer.devices import gpu_uuid

MIB = 2**20
WARM_S = 2.0  # over which drivers average the power
MATMUL_S = 8.0
QUEUED_S, MATMULS = 0.05, 20  # of work at a time
CALLS = 300


@dataclass(frozen=True)
class Gpu:
    """Torch's device 0 and its NVML counterpart."""

    uuid: str
    source: DeviceSource


@pytest.fixture
def gpu(need: Callable[[str | None], None]) -> Gpu:
    source = open_source()
    need(source.reason)
    torch.zeros(1, device="cuda:0")  # the context's own memory is not part of what is measured
    gpu = Gpu(gpu_uuid(0), source)
    source.read(gpu.uuid, *Tier)  # so that `reasons` knows what this GPU lacks
    return gpu


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"torch": torch.__version__}
    yield found
    path = os.environ.get("STEPSCOPE_GPU_REPORT")
    if path:
        Path(path).write_text(json.dumps(found, indent=1), encoding="utf-8")


def test_torchs_device_is_found_by_uuid(gpu: Gpu, report: dict[str, Any]) -> None:
    values = gpu.source.read(gpu.uuid, *Tier)
    report["device"] = next(asdict(i) for i in gpu.source.devices() if i.uuid == gpu.uuid)
    report["values"] = values
    report["reasons"] = gpu.source.reasons(gpu.uuid)
    assert set(values) | set(report["reasons"]) == {key for entry in FIELDS for key in entry.keys}
    total = torch.cuda.get_device_properties(0).total_memory
    assert values["gpu/mem_total"] == pytest.approx(total, rel=0.1)


def test_a_known_tensor_shows_in_allocated_and_in_used(gpu: Gpu) -> None:
    torch.cuda.empty_cache()
    before, used_before = allocator.read(0), gpu.source.read(gpu.uuid, Tier.FAST)["gpu/mem_used"]
    tensor = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    after, used_after = allocator.read(0), gpu.source.read(gpu.uuid, Tier.FAST)["gpu/mem_used"]
    assert after["memory/allocated"] - before["memory/allocated"] == tensor.nbytes
    assert after["memory/reserved"] - before["memory/reserved"] >= tensor.nbytes
    assert used_after - used_before >= tensor.nbytes


def test_every_call_and_its_latency(gpu: Gpu, report: dict[str, Any]) -> None:
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    report["latency_us"] = {
        reader.__name__: latency_us(reader, handle) for entry in FIELDS for reader in entry.readers
    }
    fast_us = [timed(lambda: gpu.source.read(gpu.uuid, Tier.FAST)) for _ in range(CALLS)]
    report["fast_tier_us"] = summary(fast_us)  # from 5 ms on the sampler halves its rate
    answered = {name for name, found in report["latency_us"].items() if isinstance(found, dict)}
    assert answered, report["latency_us"]


def test_energy_by_counter_and_by_power_agree(
    gpu: Gpu, report: dict[str, Any], tmp_path: Path, need: Callable[[str | None], None]
) -> None:
    need(gpu.source.reasons(gpu.uuid).get("gpu/energy"))
    series = sampled_matmul(gpu, tmp_path)
    ts, missing = series["ts"], np.full(len(series["ts"]), np.nan)
    by_counter, how = energy_joules(ts, series["gpu/power"], series["gpu/energy"])
    by_power, how_power = energy_joules(ts, series["gpu/power"], missing)
    seconds = float(ts[-1] - ts[0])
    report["matmul"] = {
        "seconds": seconds,
        "ticks": len(ts),
        "joules_by_counter": by_counter,
        "joules_by_power": by_power,
        "changes_per_second": {
            key: changes(series[key]) / seconds for key in series if key != "ts"
        },
        "tick_gap_ms": summary(1e3 * np.diff(ts)),
    }
    assert (how, how_power) == ("counter", "power")
    # The simulator's power moves with the load of the CPU that computes for it.
    assert by_power == pytest.approx(by_counter, rel=0.2 if SIMULATED else 0.05)
    assert np.nanmedian(series["gpu/util"]) > 50


def sampled_matmul(gpu: Gpu, folder: Path) -> dict[str, NDArray[np.float64]]:
    """Keep the GPU busy while it is sampled; return the series read from the store."""
    recorder = Recorder(folder, name="matmul")
    sampler = Sampler(recorder, allocator_index=0, gpu_uuids=[gpu.uuid], source=gpu.source)
    matrix = lasting_matmul()
    keep_busy(matrix, WARM_S)
    sampler.start()
    keep_busy(matrix, MATMUL_S)
    sampler.stop()
    recorder.close(RunStatus.FINISHED)
    with RunReader(folder) as reader:
        found = next(
            i for i in reader.series() if (i.stream, i.source) == (Stream.DEVICES, gpu.uuid)
        )
        block = reader.read(found.id, 0, found.rows, 1)
    return {"ts": block.ts} | dict(zip(block.keys, block.mean, strict=True))


def lasting_matmul() -> torch.Tensor:
    """Return a matrix, the larger the faster the GPU, whose MATMULS squares take QUEUED_S."""
    for size in (2**power for power in range(7, 14)):
        matrix = torch.randn(size, size, device="cuda:0", dtype=torch.bfloat16)
        multiply(matrix).synchronize()  # the first of a size also loads its kernel
        begun = time.perf_counter()
        multiply(matrix).synchronize()
        if time.perf_counter() - begun > QUEUED_S:
            break
    return matrix


def multiply(matrix: torch.Tensor) -> torch.cuda.Event:
    """Queue the work and return the event of its end."""
    for _ in range(MATMULS):
        matrix @ matrix
    ended = torch.cuda.Event()
    ended.record()
    return ended


def keep_busy(matrix: torch.Tensor, seconds: float) -> None:
    """Have the next work in the queue before the last ends."""
    end = time.monotonic() + seconds
    ended = multiply(matrix)
    while time.monotonic() < end:
        following = multiply(matrix)
        ended.synchronize()
        ended = following
    ended.synchronize()


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


def changes(values: NDArray[np.float64]) -> int:
    known = values[~np.isnan(values)]
    return int(np.count_nonzero(np.diff(known)))
