"""What the page's benchmarks share: the real server, Chromium and CPU clocks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60
# Without these Chromium looks up its maker's hosts, and a container gives it no sandbox.
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
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
    runs = folder / "runs"
    with _streamlit("app.py", ROOT, folder, STEPSCOPE_RUNS=str(runs)) as (url, process):
        yield Server(url, runs, psutil.Process(process.pid))


@contextmanager
def serve_empty_page(folder: Path) -> Iterator[str]:
    """Start a Streamlit app with only a title; yield its address."""
    folder.mkdir(parents=True)
    (folder / "app.py").write_text('import streamlit as st\n\nst.title("Empty")\n')
    with _streamlit("app.py", folder, folder) as (url, _):
        yield url


@contextmanager
def _streamlit(
    script: str, cwd: Path, folder: Path, **variables: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    folder.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), folder / "server.log"
    options = {"headless": "true", "address": "127.0.0.1", "port": port, "fileWatcherType": "none"}
    command = [sys.executable, "-m", "streamlit", "run", script]
    command += [f"--server.{name}={value}" for name, value in options.items()]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", **variables}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await_health(f"{url}/_stcore/health", process, log)
        yield url, process
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
    page.get_by_role("button", name="Start run", exact=True).click(timeout=60_000)
    page.locator("[data-testid=stepscope-live][data-status=running]").wait_for(timeout=60_000)


def await_charts(page: Page) -> None:
    """Wait until every chart in view is drawn."""
    page.locator("[data-testid=stepscope-live][data-ready]").wait_for(timeout=60_000)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process, all its threads, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the address answers. Exits with the log if the server ends."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server did not start:\n{log.read_text()}") from None
            time.sleep(0.1)
