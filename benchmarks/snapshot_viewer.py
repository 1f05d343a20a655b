"""How long a memory snapshot of 250 MB takes to open, with how much memory, and the page meanwhile.

    python -m benchmarks.snapshot_viewer [--quick] [--wait-quiet SECONDS]

The file is made by `snapshot_file.py`, put into the folder of a running server, and opened as the
page opens it: by the server's own code, in its process of its own. Meanwhile `/api/runs` is asked
ten times a second, and the streams of the page are alive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.report import at_most, quantile, say
from benchmarks.serving import Server, chromium, serve
from benchmarks.snapshot_file import write_snapshot
from stepscope.common.formatting import format_bytes

SIZE, QUICK_SIZE = 25 * 10**7, 25 * 10**6
OPEN_S, MEMORY_GB, ANSWER_MS = 20.0, 4.0, 100.0
PATIENCE_S = 300.0
ASK_S = 0.1
SPARE_BYTES = 2 * 10**9
"""Left on the disk beside the file."""
ENDING = "-m stepscope.memory.snapshots.open_snapshot"


class Watch:
    """The memory of the process that opens the file: its highest, until it is gone."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.peak = 0
        self.cpu_s = 0.0
        self.answers: list[float] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(ASK_S):
            for child in self._server.process.children(recursive=True):
                self._measure(child)
            began = time.perf_counter()
            with urllib.request.urlopen(f"{self._server.url}/api/runs", timeout=30) as answer:
                answer.read()
            self.answers.append(time.perf_counter() - began)

    def _measure(self, process: psutil.Process) -> None:
        try:
            if ENDING not in " ".join(process.cmdline()):
                return
            status = Path(f"/proc/{process.pid}/status").read_text()
            times = process.cpu_times()
        except (psutil.Error, OSError):
            return  # it has just ended
        highest = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        if highest:
            self.peak = max(self.peak, 1024 * int(highest[0].split()[1]))
        self.cpu_s = max(self.cpu_s, times.user + times.system)


def measure(size: int) -> dict[str, Any]:
    """Make the file, open it through the page; return the report's values."""
    with tempfile.TemporaryDirectory(prefix="snapshot-viewer-") as temporary:
        folder = Path(temporary)
        free = shutil.disk_usage(folder).free
        if free < size + SPARE_BYTES:
            raise SystemExit(f"{folder}: {format_bytes(free)} free, too little for the file.")
        path = folder / "runs" / "snapshots" / "large.pickle"
        path.parent.mkdir(parents=True)
        began = time.perf_counter()
        actions = write_snapshot(path, size)
        written = path.stat().st_size
        say(f"made {format_bytes(written)}, {actions:,} actions, {_since(began):.0f} s")
        with serve(folder) as server:
            idle = _idle(server)
            seconds, watch = _open(server, actions)
        say(
            f"opened in {seconds:.1f} s with {format_bytes(watch.peak)}, "
            f"{watch.cpu_s:.1f} s of CPU time"
        )
    p95 = quantile(watch.answers, 0.95)
    return {
        "bytes": written,
        "actions": actions,
        "open_s": seconds,
        "open_cpu_s": watch.cpu_s,
        "peak_gb": watch.peak / 1e9,
        "answers": len(watch.answers),
        "answer_p95_ms": None if p95 is None else 1e3 * p95,
        "answer_idle_p95_ms": idle,
        "targets": {
            "open_s": at_most(seconds, OPEN_S),
            "peak_gb": at_most(watch.peak / 1e9 if watch.peak else None, MEMORY_GB),
            "answer_p95_ms": at_most(None if p95 is None else 1e3 * p95, ANSWER_MS),
        },
    }


def _open(server: Server, actions: int) -> tuple[float, Watch]:
    """Open the page Memory; return the time until the history is drawn, and what was seen."""
    with chromium() as browser:
        page = browser.new_page()
        with Watch(server) as watch:
            began = time.perf_counter()
            page.goto(f"{server.url}/memory")
            page.get_by_text(f"{actions:,} actions").wait_for(timeout=1000 * PATIENCE_S)
            return _since(began), watch


def _idle(server: Server) -> float | None:
    """Return the time of an answer while nothing is opened."""
    with Watch(server) as watch:
        time.sleep(3)
    p95 = quantile(watch.answers, 0.95)
    return None if p95 is None else 1e3 * p95


def _since(began: float) -> float:
    return time.perf_counter() - began


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    size = QUICK_SIZE if args.quick else SIZE
    report.report("snapshot_viewer", {"quick": args.quick}, load, measure(size))


if __name__ == "__main__":
    main()
