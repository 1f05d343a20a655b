"""A real server: its end during open requests, and fatal signals."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from stepscope.host.servers import servers_folder
from stepscope.run import RunStatus, read_run, run_folders
from tests.support.server import ROOT, Server, start_server
from tests.support.waiting import wait_for, wait_until
from trainer.config import RunConfig, Runner, Workload, defaults


def serve(folder: Path, config: RunConfig, ending: str = "-") -> Server:
    """Start a server that trains."""
    script = str(ROOT / "tests" / "scripts" / "serving.py")
    return start_server(
        folder,
        (script, json.dumps(config.to_dict()), ending),
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=str(ROOT),
    )


def endless() -> RunConfig:
    return replace(defaults(Workload.LINEAR), epochs=100_000)


def test_half_a_request_holds_up_neither_the_run_nor_the_end_of_the_server(tmp_path: Path) -> None:
    server = serve(tmp_path, endless())
    folder = wait_for(lambda: next(iter(run_folders(server.runs)), None))
    wait_until(lambda: read_run(folder).run_json.get("step", 0) > 0)
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        head = f"POST /api/command HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: {server.url}\r\n"
        connection.sendall(f'{head}Content-Length: 2000\r\n\r\n{{"run":'.encode())
        address = servers_folder() / f"{port}.json"
        assert address.exists()
        server.process.send_signal(signal.SIGTERM)
        # The run has ended in order first; then the process ends despite the open request.
        assert server.process.wait(60) == 128 + signal.SIGTERM
    assert not address.exists(), "it has the token"
    assert read_run(folder).status is RunStatus.STOPPED


def test_a_fatal_signal_in_the_servers_thread_is_read_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(tmp_path, replace(endless(), runner=Runner.THREAD), "read")
    (tmp_path / "go").touch()
    assert server.process.wait(60) == -signal.SIGSEGV
    (folder,) = run_folders(server.runs)
    run = read_run(folder)
    assert run.status is RunStatus.CRASHED
    assert signal.strsignal(signal.SIGSEGV) in str(run.reason)
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
