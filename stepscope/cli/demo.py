"""`stepscope demo`: the dashboard with a run that was recorded on an H100."""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.ui import add_server_options, serve
from stepscope.host.child_process import free_port, wait_until_it_listens

EXAMPLES = ("stepscope demo", "stepscope demo --port 8600 --no-browser")
PORTS = range(8501, 8601)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_server_options(parser)


def run(options: argparse.Namespace, root: Path) -> int:
    """Become the server and open the example. Raises CommandError without the port or a package."""
    ports = range(options.port, options.port + 1) if options.port else PORTS
    port = free_port(ports)
    if port is None:
        used = f"{ports[0]}" if options.port else f"{ports[0]} to {ports[-1]}"
        raise CommandError(f"--port: must be a free port, {used} is in use. Choose another.")
    url = f"http://127.0.0.1:{port}/?run=h100"
    print(f"A run recorded on an H100: {url}")
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if not options.no_browser and any(map(os.environ.get, displays)):
        _open_when_it_listens(url, port)
    return serve(["--server.port", str(port), "--server.headless", "true"], root)


def _open_when_it_listens(url: str, port: int) -> None:
    """Open `url` from another process, as this one becomes the server.

    Streamlit opens only an address without parameters. A grandchild is no child of the server.
    """
    server = os.getpid()
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0 and wait_until_it_listens(server, port):
            webbrowser.open(url)
    finally:  # also after Ctrl-C: never the code of the caller
        os._exit(0)
