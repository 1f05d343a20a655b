"""Rows of memory as the sampler records them, made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.run import RunInfo, RunKind, read_run
from tests.support.recorded_runs import Row, write_run

MIB, GIB = 2**20, 2**30
GPU = "GPU-1"
TICK_S = 0.1
ON_GPU = {"device": GPU, "kind": RunKind.WATCH, "devices": [{"uuid": GPU, "name": "A100"}]}

# One moment of a CNN's training on an 80 GiB GPU that another program shares.
CUDA: dict[str, float | None] = {
    "gpu/mem_total": 80 * GIB,
    "gpu/mem_used": 40 * GIB,
    "gpu/mem_reserved": 500 * MIB,
    "gpu/mem_others": 10 * GIB,
    "memory/process_used": 29 * GIB,
    "memory/reserved": 28 * GIB,
    "memory/allocated": 20 * GIB,
    "memory/inactive_split": 3 * GIB,
    "memory/parameters": 2 * GIB,
    "memory/gradients": 2 * GIB,
    "memory/optimizer_state": 4 * GIB,
}


def sample(tick: int, **values: float) -> Row:
    """A row of the process: what a name like `memory__reserved` means, in MiB."""
    named = {key.replace("__", "/"): value * MIB for key, value in values.items()}
    return (tick * TICK_S, tick // 5, named)


def process(tick: int, reserved: float = 1000, **more: float) -> Row:
    values = {"memory__reserved": reserved, "memory__allocated": reserved - 200}
    return sample(tick, **(values | {"memory__inactive_split": 50} | more))


def device(tick: int, used: float = 2000, **more: float) -> Row:
    """A row of the GPU, some ms after the process's."""
    slow = {"gpu__mem_total": 10240.0} if tick % 10 == 0 else {}
    ts, step, values = sample(tick, gpu__mem_used=used, **(slow | more))
    return (ts + 0.004, step, values)


def cuda_run(folder: Path, ticks: int = 60, **run_json: Any) -> RunInfo:
    rows = [process(tick, 1000 + 10 * (tick % 7)) for tick in range(ticks)]
    gpu = [device(tick, 2000 + (500 if tick == 33 else 0)) for tick in range(ticks)]
    write_run(folder, ON_GPU | run_json, gpu=GPU, samples=rows, devices=gpu)
    return read_run(folder)


PROCESSES = [
    {"pid": 1, "name": "train.py", "user": "me", "memory": 900 * MIB, "yours": True},
    {"pid": 2, "name": "small", "user": "ann", "memory": 10 * MIB, "state": "zombie"},
    {
        "pid": 3,
        "name": "large\x1b[31m",
        "user": "bob",
        "memory": 700 * MIB,
        "command": "a\nb " * 500,
    },
    {"pid": 4, "name": None, "user": None, "memory": None, "yours": True},
    "not a process",
    {"pid": "five", "memory": -1, "name": 7, "command": ["a"]},
]
