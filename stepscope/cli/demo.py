"""`stepscope demo`: the dashboard with a run that was recorded on an H100."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
import urllib.request
import webbrowser
from pathlib import Path

from stepscope.cli.ui import add_server_options, serve

EXAMPLES = ("stepscope demo", "stepscope demo --port 8600 --no-browser")
PORTS = range(8501, 8601)
START_S = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_server_options(parser)


def run(options: argparse.Namespace, root: Path) -> int:
    """Become the server and open the example; return 1 if a package is missing."""
    port = options.port or next(filter(_free, PORTS), PORTS.start)
    url = f"http://127.0.0.1:{port}/?run=h100"
    print(f"A run recorded on an H100: {url}")
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if not options.no_browser and any(map(os.environ.get, displays)):
        _open_when_it_answers(url)
    return serve(["--server.port", str(port), "--server.headless", "true"], root)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def _open_when_it_answers(url: str) -> None:
    """Open `url` from another process, as this one becomes the server.

    Streamlit itself opens an address without parameters only. The process is forked twice, so
    that it is no child of the server.
    """
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork() == 0:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=2).close()
                webbrowser.open(url)
                break
            time.sleep(0.1)
    os._exit(0)
