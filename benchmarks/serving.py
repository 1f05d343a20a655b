"""What the page's benchmarks share: the real server, Chromium, CPU clocks and the report."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from trainer.devices import cpu_name

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60
QUIET_LOAD = 0.7
"""One-minute load average above which the numbers are marked as taken on a busy machine."""
# Without these Chromium looks up its maker's hosts, and a container gives it no sandbox.
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
            "--disable-component-update", "--disable-sync", "--disable-quic"]  # fmt: skip
VIEWPORT: ViewportSize = {"width": 1400, "height": 1000}


@dataclass(frozen=True, slots=True)
class Server:
    """A running `streamlit run app.py` with its run folders under `runs`."""

    url: str
    runs: Path
    process: psutil.Process

    def run_folder(self) -> Path:
        """Return the folder of the server's only run."""
        (folder,) = [path.parent for path in self.runs.glob("*/run.json")]
        return folder


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Start the app on a free port of localhost, without GPUs, and stop it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    port, log = _free_port(), folder / "server.log"
    environment = os.environ | {"STEPSCOPE_RUNS": str(folder / "runs"), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamlit", "run", "app.py", "--server.headless", "true",
             "--server.address", "127.0.0.1", "--server.port", str(port)],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _await_health(url, process, log)
        yield Server(url, folder / "runs", psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium, headless."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise SystemExit("Chromium is missing. Install your distribution's chromium package.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        yield browser
        browser.close()


def start_run(page: Page, url: str) -> None:
    """Open the page, press Start and wait until the run is training."""
    page.goto(url)
    page.get_by_role("button", name="Start", exact=True).click(timeout=60_000)
    page.locator("[data-testid=stepscope-live][data-status=running]").wait_for(timeout=60_000)


def await_charts(page: Page) -> None:
    """Wait until every chart in view is drawn."""
    page.locator("[data-testid=stepscope-live][data-ready]").wait_for(timeout=60_000)


def polls(page: Page) -> int:
    """Return how many answers the live charts have taken."""
    live = page.get_by_test_id("stepscope-live")
    return int(live.get_attribute("data-polls") or 0)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process, all its threads, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def children_on(cores: Sequence[int] | None) -> Iterator[None]:
    """Start processes inside on these cores only; None is all of them."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed; None without values."""
    return float(np.quantile(values, share, method="higher")) if values else None


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def wait_for_quiet(limit_s: float) -> None:
    """Wait, at most `limit_s`, until the machine has nothing else to do."""
    deadline = time.monotonic() + limit_s
    while os.getloadavg()[0] >= QUIET_LOAD and time.monotonic() < deadline:
        say(f"waiting for a quiet machine: load {os.getloadavg()[0]:.2f}")
        time.sleep(10)


def report(
    benchmark: str, options: dict[str, Any], load_before: float, results: dict[str, Any]
) -> None:
    """Print the result as one JSON line; it is met when every target with a value is."""
    targets = results["targets"]
    facts = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": options,
        "machine": _machine(),
        "load_before": round(load_before, 2),
        "quiet": load_before < QUIET_LOAD,
        **results,
        "met": all(target["met"] for target in targets.values()),
    }
    print(json.dumps(rounded(facts), ensure_ascii=False))


def at_most(value: float | None, limit: float) -> dict[str, Any]:
    """Return a target of the report; a value that could not be measured does not meet it."""
    return {"value": value, "at_most": limit, "met": value is not None and value <= limit}


def at_least(value: float | None, limit: float) -> dict[str, Any]:
    """Return a target of the report; a value that could not be measured does not meet it."""
    return {"value": value, "at_least": limit, "met": value is not None and value >= limit}


def rounded(value: Any) -> Any:
    """Return JSON values with all floats at four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def _machine() -> dict[str, Any]:
    packages = ("torch", "streamlit", "plotly")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server did not start:\n{log.read_text()}") from None
            time.sleep(0.1)
