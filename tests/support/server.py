"""A real server of the page, in its own process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "test-artifacts"


@dataclass(frozen=True, slots=True)
class Server:
    """A running `streamlit run app.py`."""

    url: str
    runs: Path
    process: subprocess.Popen[bytes]
    log: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


STREAMLIT = ("-m", "streamlit")


def start_server(folder: Path, program: Sequence[str] = STREAMLIT, **variables: str) -> Server:
    """Start a server with additional environment variables.

    `program` replaces Streamlit's command line, with its arguments.
    """
    port, log = free_port(), folder / "server.log"
    environment = os.environ | {"STEPSCOPE_RUNS": str(folder / "runs")} | variables
    with log.open("wb") as output:
        options = ["--server.headless", "true", "--server.port", str(port)]
        process = subprocess.Popen(
            [sys.executable, *program, "run", "app.py", *options],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://localhost:{port}", folder / "runs", process, log)
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=2):
                return server
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)


def stop_server(server: Server) -> None:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)
