"""A run on eight large GPUs."""

from __future__ import annotations

import time
from typing import Any

from stepscope.run import RunStatus
from stepscope.store.recorder import Recorder
from tests.support.server import Server

GIB = 2**30
GPUS = [
    {"uuid": f"GPU-{n}", "name": "NVIDIA H100 80GB HBM3", "memory_total": 80 * GIB}
    for n in range(8)
]


def record(server: Server, gpus: list[dict[str, Any]], epochs: int = 0) -> str:
    """Write a finished run on these large GPUs, whose numbers are as long as they get."""
    folder = server.runs / f"gpus{len(gpus)}-{time.time_ns()}"
    folder.mkdir(parents=True)
    recorder = Recorder(folder, name="train")
    device = gpus[0]["uuid"] if gpus else "cpu"
    recorder.describe(config={"device": device}, devices=gpus, total_steps=1_000_000, epochs=1000)
    recorder.set_status(RunStatus.RUNNING)
    recorder.epoch = 999
    values = {"train/loss": 1e-6, "perf/samples_per_sec": 123_456.0, "train/epoch": 999.0}
    for step in range(999_700, 1_000_000):
        recorder.log(step, values | {"perf/step_time": 0.01 + 0.001 * (step % 7)})
    for epoch in range(1, epochs + 1):
        recorder.epoch = epoch
        recorder.event("epoch", f"Epoch {epoch}: validation loss {1 / epoch:.4g}")
    recorder.epoch = 999
    recorder.log(1_000_000, {"val/loss": 0.1234, "val/accuracy": 97.53})
    names = ("memory/allocated", "memory/reserved", "memory/peak_allocated", "process/rss")
    recorder.sample(dict.fromkeys(names, 1023.4 * 2**20))
    values = {"gpu/mem_used": 70.5 * GIB, "gpu/mem_total": 80.0 * GIB}
    values |= {"gpu/temp": 77.0, "gpu/power": 699.9}
    for place, gpu in enumerate(gpus):
        for _ in range(2):
            recorder.sample(values | {"gpu/util": 100.0 - 10 * place}, str(gpu["uuid"]))
    recorder.event("empty_cache", "Empty cache")
    recorder.close(RunStatus.FINISHED)
    return folder.name
