"""`stepscope.show()` as a notebook displays it: framed by its own page, and by no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, expect

from tests.support.app_page import record
from tests.support.browser_page import window
from tests.support.server import ROOT, STOP_S


@contextmanager
def page_with(body: str) -> Iterator[ThreadingHTTPServer]:
    """Serve an HTML page on a port of its own, as a Jupyter server does."""

    class Handler(BaseHTTPRequestHandler):
        html = body

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(self.html.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


KERNEL = """
import sys
import stepscope

page = stepscope.show(sys.argv[1])
assert stepscope.show(sys.argv[1]) == page, "one server for all runs of a folder"
sys.stdout.write(page._repr_html_().replace("\\n", " ") + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def jupyter(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """A Jupyter server, with the file by which its kernels know it."""
    with page_with("") as server:
        about = {"port": server.server_port, "hostname": "localhost"}
        (tmp_path / f"jpserver-{os.getpid()}.json").write_text(json.dumps(about))
        yield server


@pytest.fixture
def kernel(tmp_path: Path, jupyter: ThreadingHTTPServer) -> Iterator[subprocess.Popen[str]]:
    """A kernel of that server which shows a run."""
    module = tmp_path / "jupyter_core" / "paths.py"
    module.parent.mkdir()
    module.write_text(f"def jupyter_runtime_dir(): return {str(tmp_path)!r}\n")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JPY_PARENT_PID": str(os.getpid())}
    with subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(record(tmp_path, "one"))],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_only_the_notebook_that_started_the_server_frames_the_page(
    browser: Browser, jupyter: ThreadingHTTPServer, kernel: subprocess.Popen[str]
) -> None:
    assert kernel.stdout is not None
    jupyter.RequestHandlerClass.html = html = kernel.stdout.readline()  # type: ignore[attr-defined]
    with window(browser) as tab:
        tab.goto(f"http://localhost:{jupyter.server_port}/")
        framed = tab.frame_locator("iframe[title=Stepscope]")
        expect(framed.get_by_text("Finished").first).to_be_visible()
        expect(framed.locator(".js-plotly-plot").first).to_be_visible()
    with page_with(html) as other, window(browser) as tab:
        with tab.expect_event("console", lambda line: "frame-ancestors" in line.text):
            tab.goto(f"http://localhost:{other.server_port}/")
        framed = tab.frame_locator("iframe[title=Stepscope]")
        expect(framed.get_by_text("Finished")).to_have_count(0)
    servers = psutil.Process(kernel.pid).children()
    kernel.kill()
    assert len(servers) == 1
    assert psutil.wait_procs(servers, STOP_S)[1] == [], "the server ends with its kernel"
