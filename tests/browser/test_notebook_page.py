"""`stepscope.show()` as a notebook displays it: framed by its own page, and by no other."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

import stepscope
from stepscope.integrations import notebook
from tests.support.app_page import record
from tests.support.browser_page import window


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


def test_only_the_notebook_that_started_the_server_frames_the_page(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record(tmp_path, "one")
    paths = types.SimpleNamespace(jupyter_runtime_dir=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "jupyter_core.paths", paths)  # type: ignore[arg-type]
    monkeypatch.setenv("JPY_PARENT_PID", str(os.getppid()))
    with page_with("") as jupyter:
        about = {"port": jupyter.server_port, "hostname": "localhost"}
        (tmp_path / f"jpserver-{os.getppid()}.json").write_text(json.dumps(about))
        page = stepscope.show(folder)
        assert stepscope.show("one", runs=tmp_path) == page, "one server for all runs of a folder"
        process = notebook._servers[tmp_path].process
        jupyter.RequestHandlerClass.html = page._repr_html_()  # type: ignore[attr-defined]
        with window(browser) as tab:
            tab.goto(f"http://localhost:{jupyter.server_port}/")
            framed = tab.frame_locator("iframe[title=Stepscope]")
            expect(framed.get_by_text("Finished").first).to_be_visible()
            expect(framed.locator(".js-plotly-plot").first).to_be_visible()
        with page_with(page._repr_html_()) as other, window(browser) as tab:
            with tab.expect_event("console", lambda line: "frame-ancestors" in line.text):
                tab.goto(f"http://localhost:{other.server_port}/")
            framed = tab.frame_locator("iframe[title=Stepscope]")
            expect(framed.get_by_text("Finished")).to_have_count(0)
    assert process.stdin is not None
    process.stdin.close()  # as at the end of the kernel, even if it is killed
    assert process.wait(20) is not None
