"""Hours of a training with eight GPUs in minutes: what grows in the trainer, the server, the page?

A process records 25 steps and 10 readings of 8 GPUs per second of a driven clock, with epochs,
commands, alerts and an output log that is rotated. One tab stays open; others come and go.
`--hours 24 --minutes 30` is the whole test.

    python -m benchmarks.soak [--hours 24] [--minutes 30]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from playwright.sync_api import Browser, Page

import stepscope as product
from benchmarks.report import at_least, at_most, report, say
from benchmarks.serving import VIEWPORT, await_charts, chromium, serve
from stepscope.common.clock import clock
from stepscope.run import read_run
from stepscope.run.retention import folder_size
from stepscope.store import STORE_NAME
from stepscope.store.reader import send_command
from stepscope.watch.output_log import keep_output

READINGS_HZ, STEPS_HZ, GPUS = 10, 25, 8
EPOCH_S, LOSS_GONE_S = 600, 3600
TABS = 3
EVERY_S = 8.0  # real seconds between two measurements
GROWTH = 0.05
"""Growth per measured third of the time, beyond which a value counts as growing."""
SESSION_DESCRIPTORS = 3
"""Of a tab's event loop. Streamlit keeps a session for 120 s after its tab has closed."""


def train(runs: Path, hours: float, minutes: float) -> None:
    """Record `hours` of the driven clock in about `minutes`, in this process."""
    recording = product.init("soak", runs=runs, sample=False)
    assert recording.session is not None
    assert recording.folder is not None
    recorder = recording.session.recorder
    keep_output(recording.folder, 0, print)
    uuids = [f"GPU-{number}" for number in range(GPUS)]
    recorder.describe(
        devices=[{"uuid": uuid, "name": "H100", "memory_total": 80 * 2**30} for uuid in uuids]
    )
    ticks = int(hours * 3600 * READINGS_HZ)
    began, owed = time.monotonic(), 0.0
    for tick in range(ticks):
        clock.offset += 1 / READINGS_HZ
        seconds = tick / READINGS_HZ
        wave = float(np.sin(seconds / 60))
        idle = seconds % LOSS_GONE_S > 0.8 * LOSS_GONE_S
        for uuid in uuids:
            values = {"gpu/util": 0.0 if idle else 80 + 10 * wave, "gpu/power": 500 + 90 * wave}
            values |= {"gpu/temp": 60 + 9 * wave, "gpu/mem_used": 2.0**35, "gpu/sm_clock": 1980.0}
            recorder.device(uuid, values)
        recorder.sample({"process/rss": 2.0**31, "process/cpu": 90 + wave})
        owed += STEPS_HZ / READINGS_HZ
        while owed >= 1:
            owed -= 1
            last = seconds % LOSS_GONE_S < 1 / READINGS_HZ
            recording.step(loss=float("nan") if last and tick else 1 / (1 + seconds), lr=0.1)
            print(f"step {recorder.step}: a line of about eighty characters, as scripts print it.")
        if seconds % EPOCH_S == 0:
            recording.epoch += 1
            recorder.event("epoch", f"epoch {recording.epoch}")
        ahead_s = minutes * 60 * (tick + 1) / ticks - (time.monotonic() - began)
        if ahead_s > 0.02:
            time.sleep(ahead_s)
    recording.close()


def use(process: psutil.Process) -> dict[str, float]:
    """Return resident MiB, file descriptors and threads of a process."""
    rss = process.memory_info().rss / 2**20
    return {"mib": rss, "descriptors": process.num_fds(), "threads": process.num_threads()}


def tabs(browser: Browser, url: str) -> Iterator[Page]:
    """Yield the tab that stays open, each time after another tab has come, and an old one gone."""
    stays = browser.new_page(viewport=VIEWPORT)
    stays.goto(url)
    await_charts(stays)
    others: list[Page] = []
    while True:
        others.append(browser.new_page(viewport=VIEWPORT))
        others[-1].goto(url)
        await_charts(others[-1])
        if len(others) >= TABS:
            others.pop(0).close()
        yield stays


def growth(values: list[float]) -> float:
    """Return the growth from the middle to the last third of the values, as a share."""
    third = len(values) // 3
    middle, last = np.median(values[third : 2 * third]), np.median(values[2 * third :])
    return float(last / middle - 1)


def _allowed(key: str, values: list[float]) -> float:
    """Return the growth that is none: a session more or less among those that are kept."""
    return SESSION_DESCRIPTORS / values[-1] if key == "server_descriptors" else GROWTH


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.hours, options.minutes)
        return
    load = os.getloadavg()[0]
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(Path(stack.enter_context(TemporaryDirectory()))))
        browser = stack.enter_context(chromium())
        words = ["--hours", str(options.hours), "--minutes", str(options.minutes)]
        command = [sys.executable, "-m", "benchmarks.soak", *words, "--train", str(server.runs)]
        trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        stack.callback(trainer.kill)  # after an error
        while not list(server.runs.glob("*/run.json")):
            time.sleep(0.2)
        folder = server.run_folder()
        process = psutil.Process(trainer.pid)
        for page in tabs(browser, f"{server.url}/?run={folder.name}"):
            send_command(folder, "mark", {"text": "soak"})
            page.wait_for_timeout(1e3 * EVERY_S)
            if trainer.poll() is not None:
                break
            values = {f"server_{key}": value for key, value in use(server.process).items()}
            values |= {f"trainer_{key}": value for key, value in use(process).items()}
            page.context.new_cdp_session(page).send("HeapProfiler.collectGarbage")
            heap = page.evaluate("performance.memory.usedJSHeapSize")
            values["page_heap_mib"] = heap / 2**20
            values["hours"] = read_run(folder).run_json.get("step", 0) / STEPS_HZ / 3600
            values["folder_mib"] = folder_size(folder) / 2**20
            wal = folder / f"{STORE_NAME}-wal"
            values["wal_mib"] = wal.stat().st_size / 2**20 if wal.exists() else 0.0
            say(json.dumps({key: round(value, 2) for key, value in values.items()}))
            for key, value in values.items():
                found.setdefault(key, []).append(value)
        run = read_run(folder)
        kinds = [event.kind for event in product.open(folder).events()]
    if len(found.get("hours", [])) < 6:
        raise SystemExit("Fewer than 6 measurements: give more --minutes.")
    grows = {
        key: growth(values)
        for key, values in found.items()
        if key not in ("hours", "folder_mib", "wal_mib")
    }
    results: dict[str, Any] = {
        "last": {key: values[-1] for key, values in found.items()},
        "growth": grows,
        "folder_mib_per_hour": found["folder_mib"][-1] / found["hours"][-1],
        "events": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "dropped": run.run_json.get("dropped"),
        "targets": {key: at_most(value, _allowed(key, found[key])) for key, value in grows.items()}
        | {"steps": at_least(run.run_json["step"], options.hours * 3600 * STEPS_HZ - 1)},
    }
    report("soak", {"hours": options.hours, "minutes": options.minutes}, load, results)


if __name__ == "__main__":
    main()
