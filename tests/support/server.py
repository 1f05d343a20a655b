"""A real server of the page, in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from stepscope.host.child_process import free_port, wait_until_it_listens
from tests.support.child_process import ROOT
from tests.support.waiting import wait_until

ARTIFACTS = ROOT / "test-artifacts"


@dataclass(frozen=True, slots=True)
class Server:
    """A running `streamlit run app.py`."""

    url: str
    runs: Path
    process: subprocess.Popen[bytes]
    log: Path


STREAMLIT = ("-m", "streamlit")
STOP_S = 30.0
"""Longest time from SIGTERM to the end: the product gives jobs and sweeps 13 s to stop."""


def start_server(
    folder: Path, program: Sequence[str] = STREAMLIT, cwd: Path = ROOT, **variables: str
) -> Server:
    """Start a server, with additional environment variables, from the folder `cwd`.

    `program` replaces Streamlit's command line, with its arguments. Fails the test if the server
    does not start.
    """
    port, log = free_port(), folder / "server.log"
    assert port is not None
    (folder / "runs").mkdir(exist_ok=True)
    environment = os.environ | {"STEPSCOPE_RUNS": str(folder / "runs")} | variables
    with log.open("wb") as output:
        options = ["--server.headless", "true", "--server.port", str(port)]
        process = subprocess.Popen(
            [sys.executable, *program, "run", str(ROOT / "app.py"), *options],
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://localhost:{port}", folder / "runs", process, log)
    try:
        assert wait_until_it_listens(process.pid, port)
        wait_until(lambda: _is_healthy(server.url), 60)
    except BaseException as error:
        process.kill()
        process.wait()
        if isinstance(error, AssertionError):
            pytest.fail(f"the server did not start:\n{log.read_text()}")
        raise
    return server


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2):
            return True
    except OSError:
        return False


def stop_server(server: Server) -> None:
    """End a server by SIGTERM; fail the test, after SIGKILL, if it does not end."""
    if server.process.poll() is not None:
        return
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
        pytest.fail(f"the server did not stop:\n{server.log.read_text()[-4000:]}")


@contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """Run a server in a thread and close it at the end; yield its address."""
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
