"""A real server: its end during open requests, its limits, and fatal signals."""

from __future__ import annotations

import base64
import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import live_chart
from stepscope.host.servers import servers_folder
from stepscope.run import RunStatus, read_run, run_folders
from tests.support.server import ROOT, Server, start_server, stop_server
from tests.support.waiting import wait_for, wait_until
from trainer.config import RunConfig, Runner, Workload, defaults


def serve(folder: Path, config: RunConfig, function: str = "") -> Server:
    """Start a server that trains."""
    script = str(ROOT / "tests" / "scripts" / "serving.py")
    return start_server(
        folder,
        (script, json.dumps(config.to_dict()), function),
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=str(ROOT),
    )


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 10)


def head(server: Server, method: str, path: str, *lines: str) -> bytes:
    """Return a request up to its body."""
    host = server.url.removeprefix("http://")
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def post(server: Server, *lines: str) -> bytes:
    return head(server, "POST", "/api/command", f"Origin: {server.url}", *lines)


def answer(connection: socket.socket) -> str:
    """Return the head of the answer, and what of the body came with it."""
    received = b""
    while b"\r\n\r\n" not in received and (chunk := connection.recv(65536)):
        received += chunk
    return received.decode(errors="replace")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without runs."""
    made = start_server(tmp_path_factory.mktemp("server"), CUDA_VISIBLE_DEVICES="")
    yield made
    stop_server(made)


def endless() -> RunConfig:
    return replace(defaults(Workload.LINEAR), epochs=100_000)


def test_half_a_request_holds_up_neither_the_run_nor_the_end_of_the_server(tmp_path: Path) -> None:
    server = serve(tmp_path, endless())
    folder = wait_for(lambda: next(iter(run_folders(server.runs)), None))
    wait_until(lambda: read_run(folder).run_json.get("step", 0) > 0)
    with connect(server) as connection:
        connection.sendall(post(server, "Content-Length: 2000") + b'{"run":')
        address = servers_folder() / f"{server.url.rpartition(':')[2]}.json"
        assert address.exists()
        server.process.send_signal(signal.SIGTERM)
        # The run has ended in order first; then the process ends despite the open request.
        assert server.process.wait(60) == 128 + signal.SIGTERM
    assert not address.exists(), "it has the token"
    assert read_run(folder).status is RunStatus.STOPPED


def websocket(server: Server, *lines: str) -> str:
    """Open Streamlit's WebSocket and return the head of the answer."""
    key = base64.b64encode(bytes(16)).decode()
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    with connect(server) as connection:
        given = head(
            server, "GET", "/_stcore/stream", *upgrade, f"Sec-WebSocket-Key: {key}", *lines
        )
        connection.sendall(given)
        return answer(connection)


def test_only_the_pages_own_origin_opens_the_websocket(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    assert websocket(server, f"Origin: {server.url}").startswith("HTTP/1.1 101 ")
    assert websocket(server).startswith("HTTP/1.1 101 ")  # no browser
    for origin in (
        f"http://localhost:{port + 1}",
        f"http://127.0.0.1:{port}",
        "http://localhost",
        f"http://localhost.evil.example:{port}",
        "null",
    ):
        assert websocket(server, f"Origin: {origin}").startswith("HTTP/1.1 403 "), origin


def test_no_page_may_frame_an_answer(server: Server) -> None:
    api = ("/api/series", "/api/absent")
    for path in ("/", "/runs", "/_stcore/health", *api, live_chart.PLOTLY_URL):
        with connect(server) as connection:
            connection.sendall(head(server, "GET", path))
            lines = answer(connection).lower().splitlines()
        assert "content-security-policy: frame-ancestors 'none'" in lines, path


@pytest.mark.parametrize(("function", "name"), [("abort", "SIGABRT"), ("read", "SIGSEGV")])
def test_a_fatal_signal_in_the_servers_thread_is_read_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, name: str
) -> None:
    server = serve(tmp_path, replace(endless(), runner=Runner.THREAD), function)
    (tmp_path / "go").touch()
    assert server.process.wait(60) == -signal.Signals[name]
    (folder,) = run_folders(server.runs)
    run = read_run(folder)
    assert run.status is RunStatus.CRASHED
    assert signal.strsignal(signal.Signals[name]) in str(run.reason)
    trace = (folder / "traceback.txt").read_text()
    assert "trainer/train.py" in trace
    monkeypatch.setenv("STEPSCOPE_RUNS", str(server.runs))
    st.cache_resource.clear()
    page = AppTest.from_file(str(ROOT / "dashboard" / "main.py"), default_timeout=60)
    page.query_params["run"] = folder.name
    page.query_params["tab"] = "logs"
    page.run()
    st.cache_resource.clear()
    assert any("trainer/train.py" in code.value for code in page.code)
