"""A profiled step: its trace and its summary, made up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from stepscope.profiling import summary_name
from stepscope.profiling.chrome_trace import ChromeTrace
from stepscope.profiling.summary import ProfileSummary, summarize, to_text

MAIN, AUTOGRAD = 7, 8


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Any:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def op(name: str, ts: float, dur: float, link: int, tid: int = MAIN) -> Any:
    return event("cpu_op", name, ts, dur, tid, **{"External id": link})


def kernel(dur: float, link: int) -> Any:
    return event("kernel", "sgemm", 500.0, dur, 99, **{"External id": link})


def allocation(ts: float, size: int, device_type: int = 0, tid: int = MAIN) -> Any:
    args = {"Bytes": size, "Device Type": device_type, "Addr": 1}
    where = {"ph": "i", "cat": "cpu_instant_event", "tid": tid}
    return {**where, "name": "[memory]", "ts": ts, "args": args}


def frame(name: str, ts: float, dur: float) -> Any:
    return event("python_function", name, ts, dur)


STEP = [
    frame("train.py(9): main", 0, 100),
    event("user_annotation", "data", 1, 9),
    frame("nn.Module: Net_0", 10, 20),
    frame("torch/nn/modules/module.py(1779): _wrapped_call_impl", 10, 20),
    frame("nn.Module: Linear_0", 12, 16),
    op("aten::linear", 13, 12, 1),
    op("aten::addmm", 14, 8, 2),
    frame("torch/autograd/__init__.py(255): backward", 30, 40),
    op("autograd::engine", 35, 30, 3, AUTOGRAD),
    op("aten::mm", 36, 10, 4, AUTOGRAD),
    event("user_annotation", "Optimizer.step#SGD.step", 70, 20),
    op("aten::add_", 75, 10, 5),
    op("aten::add_", 76, 4, 6),
    kernel(300.0, 2),
    kernel(200.0, 4),
    kernel(50.0, 6),
    kernel(5.0, 77),
    allocation(15, 400, 1),
    allocation(16, 64),
    allocation(24, -24),
    allocation(95, 1000),
]


def trace_of(events: list[Any]) -> Any:
    content = {"schemaVersion": 1, "traceEvents": events, "traceName": "x"}
    return ChromeTrace(io.BytesIO(json.dumps(content).encode()))


def summary(*, cuda: bool = True) -> ProfileSummary:
    return summarize(trace_of(STEP), first=5, last=6, cuda=cuda, thread=MAIN)


def write_profile(folder: Path, first: int, last: int, rank: int = 0) -> None:
    (folder / summary_name(first, last, rank)).write_text(to_text(summary()))
