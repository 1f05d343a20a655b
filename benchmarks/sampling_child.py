"""One way to read all GPUs, ten times a second for a while, in a process of its own.

    python -m benchmarks.sampling_child NAME SECONDS

NAME is stepscope, nvitop or gpustat. The last line of stdout is a JSON object: seconds of CPU and
wall time a tick, and the calls of NVML a tick where the library counts them (the simulator does).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PERIOD_S = 0.1
WARM_S = 1.0


def ours(seconds: float) -> dict[str, float]:
    """Run the sampler's thread over a recorder that writes; count its thread alone, and all."""
    recorder_module = importlib.import_module("stepscope.recorder.recorder")
    sampler_module = importlib.import_module("stepscope.session.sampler")
    status = importlib.import_module("stepscope.run").RunStatus.FINISHED

    class Recorder(recorder_module.Recorder):  # type: ignore[misc, name-defined]
        """Counts ticks and keeps how long each took."""

        costs: list[float]

        def sample(self, values: Mapping[str, float]) -> None:
            self.costs.append(values.get("sampler/cost", 0.0))
            super().sample(values)

    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), name="sampler")
        recorder.costs = []
        sampler = sampler_module.Sampler(recorder, allocator_index=None, period_s=PERIOD_S)
        sampler.start()
        clock = time.pthread_getcpuclockid(sampler._thread.ident)
        time.sleep(WARM_S)
        calls, before = nvml_calls(), (time.clock_gettime(clock), time.process_time())
        recorder.costs.clear()
        time.sleep(seconds)
        ticks = len(recorder.costs)
        thread_s = (time.clock_gettime(clock) - before[0]) / ticks
        process_s = (time.process_time() - before[1]) / ticks
        calls = nvml_calls() - calls
        sampler.stop()
        recorder.close(status)
    return {
        "ticks": ticks,
        "cpu_s": thread_s,
        "with_writing_s": process_s,
        "wall_s": sum(recorder.costs) / ticks,
        "calls": calls / ticks,
    }


def theirs(look: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Call `look` ten times a second, or as often as it can; count the CPU of the process."""
    deadline = time.monotonic()
    begin = deadline + WARM_S
    end = begin + seconds
    cpu_s = wall_s = 0.0
    ticks = calls = 0
    while deadline < end:
        before = time.perf_counter(), time.process_time(), nvml_calls()
        look()
        if deadline >= begin:
            wall_s += time.perf_counter() - before[0]
            cpu_s += time.process_time() - before[1]
            calls += nvml_calls() - before[2]
            ticks += 1
        deadline = max(deadline + PERIOD_S, time.monotonic())
        time.sleep(max(0.0, deadline - time.monotonic()))
    return {
        "ticks": ticks,
        "cpu_s": cpu_s / ticks,
        "wall_s": wall_s / ticks,
        "calls": calls / ticks,
    }


def nvitop() -> Callable[[], Any]:
    """Return nvitop's snapshot of all GPUs."""
    devices = importlib.import_module("nvitop").Device.all()
    return lambda: [device.as_snapshot() for device in devices]


def gpustat() -> Callable[[], Any]:
    """Return gpustat's query of all GPUs."""
    module = importlib.import_module("gpustat")
    return lambda: module.new_query()


def nvml_calls() -> int:
    """Return the calls of NVML by this process, if its library counts them; else 0."""
    try:
        count = ctypes.CDLL("libnvidia-ml.so.1").cudasim_nvml_counts
    except (OSError, AttributeError):
        return 0
    count.restype = ctypes.c_char_p
    return sum(json.loads(count()).values())


def main() -> None:
    """Measure one of them."""
    name, seconds = sys.argv[1], float(sys.argv[2])
    peers = {"nvitop": nvitop, "gpustat": gpustat}
    found = ours(seconds) if name == "stepscope" else theirs(peers[name](), seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
