"""What it costs a step to record values on a GPU, against a copy and an event at each step.

    python -m benchmarks.readback [--quick] [--launches 100] [--rounds 60]

A step launches small kernels and has two values, loss and gradient norm. It runs bare, with
`CudaScalarReadback`, and with `EachStep`, which copies each value to page-locked memory and
records an event at every step. The ways take turns in one process, in blocks between bare ones; a
second bare block shows the noise. Ratios are of seconds; `us_a_step` is the difference to bare in
microseconds. On the simulator only the number of calls has a meaning.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.pairs import BARE, interval, order, ratios
from benchmarks.report import at_most, say
from stepscope.recorder.cuda_readback import SLOTS, CudaScalarReadback, MetricRow

OURS, EACH = "device_copy", "copy_each_step"
BLOCK_S = 0.1

Values = Mapping[str, Tensor]


class EachStep:
    """One copy to the host for each value and one event for each step."""

    def __init__(self, sink: Callable[[int, float, MetricRow], None]) -> None:
        self._sink = sink
        host = torch.empty((SLOTS, 2), pin_memory=True)
        self._free = [
            (row.unbind(), row.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for row in host.unbind()
        ]
        self._waiting: deque[tuple[int, Any]] = deque()

    def put(self, step: int, ts: float, row: MetricRow, scalars: Values) -> None:
        """Queue the copies."""
        slot = self._free.pop()
        for cell, scalar in zip(slot[0], scalars.values(), strict=True):
            cell.copy_(scalar.detach(), non_blocking=True)
        slot[2].record()
        self._waiting.append((step, slot))

    def poll(self) -> None:
        """Hand on what has landed."""
        while self._waiting and self._waiting[0][1][2].query():
            step, slot = self._waiting.popleft()
            self._sink(step, 0.0, dict(zip(("loss", "norm"), slot[1].tolist(), strict=True)))
            self._free.append(slot)


def nowhere(step: int, ts: float, row: MetricRow) -> None:
    """Take a row."""


class Steps:
    """Steps of one process, recorded in a way that is named for each block."""

    def __init__(self, launches: int) -> None:
        self._launches = launches
        self._x = torch.randn(64, 64, device="cuda")
        self._w = torch.ones((), device="cuda", requires_grad=True)
        self._readers = {OURS: CudaScalarReadback(nowhere), EACH: EachStep(nowhere)}

    def seconds(self, way: str, steps: int) -> float:
        """Return the seconds of a block of steps, until the device has finished them."""
        reader, x, w = self._readers.get(way), self._x, self._w
        began = time.perf_counter()
        for step in range(steps):
            for _ in range(self._launches):
                x.add_(0.0)
            loss, norm = w * 2, x[0, 0]
            if reader is not None:
                reader.poll()
                reader.put(step, 0.0, {}, {"loss": loss, "norm": norm})
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        if reader is not None:
            reader.poll()
        return took


def calls_a_step(steps: Steps, way: str, count: int) -> dict[str, float] | None:
    """Return the calls of CUDA that copy or record per step; None without the simulator."""
    if importlib.util.find_spec("cudasim") is None:
        return None
    import cudasim  # noqa: PLC0415 - where there is a simulator

    with cudasim.counted() as calls:
        steps.seconds(way, count)
    names = ("copy d2h", "cudaEventRecordWithFlags", "cudaEventQuery")
    return {name: calls.get(name, 0) / count for name in names}


def measure(launches: int, rounds: int) -> dict[str, Any]:
    """Measure all ways; return the report's values."""
    steps = Steps(launches)
    for way in (BARE, OURS, EACH, BARE):
        settling = steps.seconds(way, 100) / 100
    count = max(10, round(BLOCK_S / settling))
    blocks = [(way, steps.seconds(way, count)) for way in order([OURS, EACH], rounds, seed=0)]
    found = ratios(blocks)
    bare_us = 1e6 * median(took for way, took in blocks if way == BARE) / count
    above = {way: bare_us * (median(values) - 1) for way, values in found.items()}
    for way, value in above.items():
        say(f"{way}: {value:+.2f} us a step of {bare_us:.0f} us")
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps_a_block": count,
        "bare_us": bare_us,
        "us_a_step": above,
        "seconds_to_bare": {way: interval(values) for way, values in found.items()},
        "calls_a_step": {way: calls_a_step(steps, way, count) for way in (BARE, OURS, EACH)},
        "targets": {"less than a copy at each step": at_most(above[OURS] - above[EACH], 0.0)},
    }


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds")
    parser.add_argument("--launches", type=int, default=100, help="kernels a step")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Needs CUDA: a GPU, or the simulator (simulator/).")
    options = {"quick": args.quick, "launches": args.launches}
    load, rounds = os.getloadavg()[0], 4 if args.quick else args.rounds
    report.report("readback", options, load, measure(args.launches, rounds))


if __name__ == "__main__":
    main()
