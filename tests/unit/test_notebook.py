"""`stepscope.show()`: what a notebook displays, and who may frame the page."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

import stepscope
from dashboard.api.access import local_origins
from stepscope.host.child_process import free_port, wait_until_it_listens
from stepscope.integrations import notebook
from stepscope.integrations.notebook import RunPage, notebook_origins
from tests.support.run_folders import make_run


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime file of the Jupyter server of this kernel."""
    paths = types.SimpleNamespace(jupyter_runtime_dir=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "jupyter_core.paths", paths)  # type: ignore[arg-type]
    monkeypatch.setenv("JPY_PARENT_PID", "4711")
    return tmp_path / "jpserver-4711.json"


def test_the_origins_are_those_of_the_kernels_jupyter_server(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notebook_origins() == []
    for content in ("{", "[]", '{"port": "x"}'):
        runtime.write_text(content)
        assert notebook_origins() == [], content
    runtime.write_text(json.dumps({"port": 8889, "url": "http://localhost:8889/"}))
    assert notebook_origins() == ["http://localhost:8889", "http://127.0.0.1:8889"]
    runtime.write_text(json.dumps({"port": 8889, "secure": True}))
    assert notebook_origins() == [], "https may not frame http"
    monkeypatch.setenv("JUPYTERHUB_USER", "eve")
    assert notebook_origins() == []
    monkeypatch.delenv("JUPYTERHUB_USER")
    monkeypatch.setenv("JPY_PARENT_PID", "../4711")
    assert notebook_origins() == []


def test_only_origins_of_this_machine_with_a_port_may_frame() -> None:
    good = ["http://localhost:8888", "http://127.0.0.1:1"]
    bad = ["*", "http://localhost:*", "http://localhost:1;x", "http://localhost.evil:80"]
    assert local_origins(" ".join([*good, *bad])) == good
    assert local_origins("http://localhost:80\nhttp://127.0.0.1:80,x") == ["http://localhost:80"]


def test_a_page_is_a_frame_and_a_link_or_only_a_link() -> None:
    url = 'http://localhost:1/?run=a&x="><script>'
    html = RunPage(url, 640, framed=True)._repr_html_()
    assert "<script>" not in html
    assert 'src="http://localhost:1/?run=a&amp;x=&quot;&gt;&lt;script&gt;&amp;embed=true"' in html
    unframed = RunPage(url, 640, framed=False)._repr_html_()
    assert "<iframe" not in unframed
    assert 'href="http://localhost:1/?run=a' in unframed


def test_a_server_that_ends_at_once_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, status="finished")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho streamlit is not installed.\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(notebook.sys, "executable", str(program))
    for _ in range(2):  # it is started again
        with pytest.raises(stepscope.RunError, match="did not start. streamlit is not installed"):
            stepscope.show(folder)


def test_a_server_of_another_process_is_not_shown(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert wait_until_it_listens(os.getpid(), port)
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            assert not wait_until_it_listens(process.pid, port)
        assert free_port([port]) is None
    assert free_port([port]) == port


def test_an_interrupted_start_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec cat\n")
    program.chmod(0o755)
    monkeypatch.setattr(notebook.sys, "executable", str(program))
    pids: list[int] = []

    def interrupted(pid: int, port: int) -> bool:
        pids.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(notebook, "wait_until_it_listens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stepscope.show(make_run(tmp_path, status="finished"))
    assert not psutil.pid_exists(pids[0])


def test_the_address_has_the_run_and_a_server_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    process = types.SimpleNamespace(poll=lambda: None, pid=1, stdin=io.BytesIO())

    def popen(*_: object, env: dict[str, str], **options: object) -> Any:
        started.append(Path(env["STEPSCOPE_RUNS"]))
        return process

    module = types.SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(notebook, "subprocess", module)
    monkeypatch.setattr(notebook, "wait_until_it_listens", lambda pid, port: True)
    monkeypatch.setattr(notebook, "free_port", lambda: 8601 + len(started))
    monkeypatch.setattr(notebook, "notebook_origins", lambda: ["http://localhost:8888"])
    with stepscope.init("demo", runs=tmp_path / "mine", sample=False) as recording:
        assert recording.folder is not None
        page = stepscope.show(height=300)
    assert page == RunPage(f"http://localhost:8601/?run={recording.folder.name}", 300, framed=True)
    other = make_run(tmp_path / "other", status="finished")
    assert stepscope.show(stepscope.open(other)).url.startswith("http://localhost:8602/?run=")
    assert stepscope.show(recording.folder).url == page.url
    process.poll = lambda: 1
    assert stepscope.show(other).url == f"http://localhost:8603/?run={other.name}"
    assert [root.name for root in started if root.is_absolute()] == ["mine", "other", "other"]
