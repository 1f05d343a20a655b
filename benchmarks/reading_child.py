"""One read of a long run in a fresh process, for `reader.py`.

    python -m benchmarks.reading_child NAME WHAT FOLDER STEPS

WHAT is `chart` (one overview of the whole run), `zoom` (a random window of 1 % of the steps),
`page` and `page_zoom` (the same as the live page answers them: with run.json, all series, newest
values and events, as JSON-able values) or `incremental` (again and again the newest 1000 rows, from
a warm process; `read` is without opening the file). Prints one JSON line: milliseconds, points,
and the peak of resident memory above that after the imports, in MB.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.long_runs import KEYS, write_tensorboard, write_trackio
from benchmarks.peers.adapters import OURS, PROJECT
from dashboard.charts import series
from stepscope.metrics import Stream
from stepscope.run import read_run
from stepscope.store import SeriesBlock, StoreReader

NEW_ROWS = 1_000
REPEATS = 50
PEER_REPEATS = 3
WINDOW = 0.01

Read = Callable[[Path, int], Any]


def chart(folder: Path, _steps: int) -> int:
    """Open the run, find its steps, read them in 500 buckets at most."""
    with StoreReader(folder) as reader:
        (info,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        return len(reader.read(info.id, 0, info.rows, series.fitting_bucket(info.rows)))


def zoom(folder: Path, steps: int) -> int:
    """Open the run, find a window's rows, read them in 500 buckets at most."""
    low, high = random_window(steps)
    with StoreReader(folder) as reader:
        (info,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        start, stop = reader.rows_between(info.id, "step", low, high)
        return len(reader.read(info.id, start, stop, series.fitting_bucket(stop - start)))


def page(folder: Path, _steps: int) -> int:
    """Return what a page gets that has just been opened."""
    run = read_run(folder)
    with StoreReader(folder) as reader:
        return len(series.update(reader, run, {}, 0)["series"]["steps"]["s"])


def page_zoom(folder: Path, steps: int) -> int:
    """Return what a page gets for a window."""
    run, (low, high) = read_run(folder), random_window(steps)
    with StoreReader(folder) as reader:
        return len(series.window(reader, run, "step", low, high)["series"]["steps"]["s"])


def random_window(steps: int) -> tuple[float, float]:
    """Return the first and last step of a random window."""
    low = random.randrange(int(steps * (1 - WINDOW)))
    return low, low + steps * WINDOW - 1


def read_trackio(_folder: Path, _steps: int) -> int:
    """Return all rows: trackio reads a run as a whole, for a chart and for a window of it."""
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    return len(storage.get_logs(PROJECT, "run"))


def open_tensorboard(folder: Path) -> Any:
    """Return an accumulator that keeps every scalar."""
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    return module.EventAccumulator(str(folder), size_guidance={"scalars": 0})


def read_tensorboard(folder: Path, _steps: int) -> int:
    """Return one metric; the accumulator always loads the whole file."""
    events = open_tensorboard(folder)
    events.Reload()
    return len(events.Scalars(KEYS[0]))


def incremental_ours(folder: Path, steps: int) -> dict[str, Any]:
    """Read the newest rows as a page does at each poll: open, look, read, close."""

    def read() -> tuple[float, SeriesBlock]:
        with StoreReader(folder) as reader:
            (info,) = [info for info in reader.series() if info.stream == Stream.STEPS]
            began = time.perf_counter()
            block = reader.read(info.id, info.rows - NEW_ROWS, info.rows, 1)
            return time.perf_counter() - began, block

    whole, inner, points = [], [], 0
    for _ in range(REPEATS):
        began = time.perf_counter()
        read_s, block = read()
        whole.append(time.perf_counter() - began)
        inner.append(read_s)
        points = len(block)
    return {"ms": _median_ms(whole[1:]), "read_ms": _median_ms(inner[1:]), "points": points}


def incremental_trackio(folder: Path, steps: int) -> dict[str, Any]:
    """Read after rows came: there is no call for the new ones alone."""
    read_trackio(folder, steps)
    times, points = [], 0
    for number in range(PEER_REPEATS):
        write_trackio(folder, NEW_ROWS, first=steps + number * NEW_ROWS)
        began = time.perf_counter()
        points = read_trackio(folder, steps)
        times.append(time.perf_counter() - began)
    return {"ms": _median_ms(times), "points": points}


def incremental_tensorboard(folder: Path, steps: int) -> dict[str, Any]:
    """Reload an accumulator that is already open, after events came in the next file."""
    events = open_tensorboard(folder)
    events.Reload()
    times, points = [], 0
    for number in range(PEER_REPEATS):
        time.sleep(1.1)  # names of event files have whole seconds
        write_tensorboard(folder, NEW_ROWS, first=steps + number * NEW_ROWS)
        began = time.perf_counter()
        events.Reload()
        points = len(events.Scalars(KEYS[0]))
        times.append(time.perf_counter() - began)
    return {"ms": _median_ms(times), "points": points}


READS: dict[tuple[str, str], Read] = {
    (OURS, "chart"): chart,
    (OURS, "zoom"): zoom,
    (OURS, "page"): page,
    (OURS, "page_zoom"): page_zoom,
    ("trackio", "chart"): read_trackio,
    ("tensorboard", "chart"): read_tensorboard,
}
INCREMENTAL: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    OURS: incremental_ours,
    "trackio": incremental_trackio,
    "tensorboard": incremental_tensorboard,
}
IMPORTS = {
    "trackio": "trackio.sqlite_storage",
    "tensorboard": "tensorboard.backend.event_processing.event_accumulator",
}


def peak_bytes() -> int:
    """Return the highest resident memory since the last `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def reset_peak() -> None:
    """Let the peak begin anew at what is resident now: imports have higher ones."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(read: Callable[[], Any]) -> dict[str, Any]:
    """Call once; return what it returned as `points`, its milliseconds and its memory."""
    reset_peak()
    before, began = peak_bytes(), time.perf_counter()
    points = read()
    ms = 1e3 * (time.perf_counter() - began)
    return {"ms": ms, "points": points, "peak_mb": (peak_bytes() - before) / 1e6}


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def main() -> None:
    """Read what the arguments say and print what it took."""
    name, what, folder, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    if name in IMPORTS:
        import_module(IMPORTS[name])
    if what == "incremental":
        result = INCREMENTAL[name](folder, steps)
    else:
        result = measured(lambda: READS[name, what](folder, steps))
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
