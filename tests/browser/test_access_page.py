"""The token in a browser, and pages of other origins in the browser of the server's user."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from playwright.sync_api import Browser, expect

from stepscope.host.servers import servers_folder
from tests.support.app_page import record
from tests.support.browser_page import window
from tests.support.other_user import SOMEBODY, needs_root, relay_of
from tests.support.server import ARTIFACTS, Server


@contextmanager
def foreign_page() -> Iterator[str]:
    """Serve an empty page of another origin, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 1  # s: Chromium opens a spare connection, which would keep its thread

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>Foreign</title><body>")

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as foreign:
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        yield f"http://localhost:{foreign.server_port}/"
        foreign.shutdown()


@needs_root
def test_a_browser_of_another_user_needs_the_token_once(browser: Browser, server: Server) -> None:
    """Its requests reach the server over the socket of another user."""
    record(server.runs, "admitted")
    port = int(server.url.rpartition(":")[2])
    address = json.loads((servers_folder() / f"{port}.json").read_text())["url"]
    token = address.rpartition("=")[2]
    with relay_of(SOMEBODY, port) as relayed, window(browser) as tab:
        url = f"http://localhost:{relayed}"
        sent: list[str] = []
        tab.on("request", lambda request: sent.append(json.dumps(request.headers)))
        refused = tab.goto(f"{url}/runs")
        assert refused is not None
        assert refused.status == 403
        expect(tab.get_by_role("heading", level=1)).to_be_visible()
        ARTIFACTS.mkdir(exist_ok=True)
        tab.screenshot(path=ARTIFACTS / "access-refused.png")
        assert tab.context.cookies() == []
        with foreign_page() as address:
            tab.goto(address.replace("localhost", "127.0.0.1"))  # another site
            tab.evaluate("(url) => { location.href = url; }", f"{url}/?run=admitted&token={token}")
            tab.wait_for_url(f"{url}/?run=admitted**")
        expect(tab.get_by_text("Finished").first).to_be_visible()
        expect(tab.locator(".js-plotly-plot").first).to_be_visible()
        assert "token" not in tab.url
        assert "run=admitted" in tab.url
        (cookie,) = [
            each for each in tab.context.cookies() if each["name"].startswith("stepscope-token")
        ]
        assert cookie["name"] == f"stepscope-token-{port}"
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["domain"]) == (
            True,
            "Lax",
            "localhost",
        )
        assert len(sent) > 10
        assert [headers for headers in sent if token in headers] == []
