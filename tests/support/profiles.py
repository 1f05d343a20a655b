"""A profile of two steps, from rows like those of torch's `key_averages()`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stepscope.profiling import summary_name
from stepscope.profiling.summary import ProfileSummary, summarize, to_json

CPU = SimpleNamespace(name="CPU")
CUDA = SimpleNamespace(name="CUDA")


def average(name: str, self_us: float = 1.0, **values: Any) -> Any:
    """Return a row: of an operator on the CPU, unless `values` replace that."""
    row = {
        "key": name,
        "count": 2,
        "device_type": CPU,
        "is_user_annotation": False,
        "self_cpu_time_total": self_us,
        "cpu_time_total": self_us,
        "self_device_time_total": 0,
        "device_time_total": 0,
        "self_cpu_memory_usage": 0,
        "self_device_memory_usage": 0,
    }
    return SimpleNamespace(**(row | values))


def averages(*, cuda: bool = True) -> list[Any]:
    """Return the rows of two steps; without `cuda` no kernels were recorded."""
    device_us = 300 if cuda else 0
    on_device = {"device_type": CUDA, "self_device_time_total": 300, "device_time_total": 300}
    rows = [
        average("forward", 4.0, cpu_time_total=20.04, is_user_annotation=True),
        average(
            "aten::addmm",
            8.0,
            self_device_time_total=device_us,
            device_time_total=device_us,
            self_cpu_memory_usage=64,
            self_device_memory_usage=-400,
        ),
    ]
    if cuda:
        rows.append(average("sgemm", 0.0, **on_device))
        rows.append(average("forward", 0.0, **on_device, is_user_annotation=True))
    return rows


def summary(*, cuda: bool = True) -> ProfileSummary:
    return summarize(averages(cuda=cuda), first=5, last=6)


def write_profile(folder: Path, first: int, last: int, rank: int = 0) -> None:
    (folder / summary_name(first, last, rank)).write_bytes(to_json(summary()))
