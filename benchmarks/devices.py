"""What the page Devices costs the server: a look at all GPUs, an answer, ten minutes of memory.

    CUDASIM_DEVICES=8 .venv-cudasim/bin/python -m benchmarks.devices   # or on a machine with GPUs

The times are those of Python and ctypes on the simulator, whose NVML answers at once; on GPUs the
driver's own come on top.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable

from benchmarks import report
from dashboard.machine.content import machine_content
from stepscope.gpu.device_events import REASONS
from stepscope.gpu.machine_monitor import DRAWN, KEPT_READINGS, DeviceHistory, MachineMonitor
from stepscope.gpu.source import open_source

LOOKS = 200
TARGET = 0.005
"""Share of a core at one look a second."""


def cpu_s(call: Callable[[], object]) -> float:
    """Return the median CPU seconds of a call in this thread."""
    times = []
    for _ in range(LOOKS):
        begun = time.thread_time()
        call()
        times.append(time.thread_time() - begun)
    return statistics.median(times)


def history_bytes(keys: tuple[str, ...]) -> int:
    """Return the memory of one GPU's ten minutes, every value another number."""
    tracemalloc.start()
    history = DeviceHistory(keys)
    for second in range(KEPT_READINGS):
        history.add(float(second), {key: second + 0.5 + place for place, key in enumerate(keys)})
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def main() -> int:
    """Measure on the GPUs of this machine, and print one JSON object last."""
    load = os.getloadavg()[0]
    machine = MachineMonitor(
        functools.partial(open_source, reader="page"), pause=lambda seconds: None
    )
    machine.arm(True)
    view = machine.poll()
    if view.reason is not None:
        report.say(f"Nothing to measure: {view.reason}")
        return 1
    look_s = cpu_s(machine.look)
    answer_s = cpu_s(lambda: json.dumps(machine_content(view, {}, {})))
    results = {
        "gpus": len(view.devices),
        "look_ms": 1e3 * look_s,
        "answer_ms": 1e3 * answer_s,
        "answer_bytes": len(json.dumps(machine_content(view, {}, {}))),
        "history_bytes_a_gpu": history_bytes((*DRAWN, *REASONS)),
        "targets": {"core": report.at_most(look_s, TARGET)},
    }
    report.report("devices", {}, load, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
