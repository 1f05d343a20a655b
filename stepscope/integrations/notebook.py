"""Show the dashboard in a notebook: `stepscope.show()`."""

from __future__ import annotations

import contextlib
import html
import importlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from stepscope import tracker
from stepscope.host.child_process import HOST, free_port, wait_until_it_listens
from stepscope.recorded_run import Run, open_run
from stepscope.run import RunError, runs_root

FRAMES = "STEPSCOPE_FRAMES"
"""Environment variable of the server: origins, separated by spaces, that may frame its pages."""
END_WITH_STDIN = "STEPSCOPE_END_WITH_STDIN"
"""Environment variable of the server: it ends when its standard input, a pipe, is closed."""
HOSTS = ("localhost", HOST)

_servers: dict[Path, _Server] = {}  # Servers of this process by their folder of all runs.


@dataclass(frozen=True, slots=True)
class RunPage:
    """Address of the page in this machine's browser; a notebook displays the page itself.

    Without `framed` only a link is displayed: the address of this notebook is unknown.
    """

    url: str
    height: int
    framed: bool

    def _repr_html_(self) -> str:
        url, embedded = html.escape(self.url), html.escape(f"{self.url}&embed=true")
        style = f"width:100%;height:{self.height}px;border:1px solid #8884"
        frame = f'<iframe src="{embedded}" style="{style}" title="Stepscope"></iframe>'
        link = f'<a href="{url}" target="_blank" rel="noopener">Open Stepscope in a new tab</a>'
        return f"{frame if self.framed else ''}<div>{link}</div>"


@dataclass(frozen=True, slots=True)
class _Server:
    process: subprocess.Popen[bytes]
    port: int
    framed: bool


def show(
    run: Run | tracker.Tracker | Path | str | None = None,
    *,
    height: int = 800,
    runs: Path | str | None = None,
) -> RunPage:
    """Return the dashboard's page of a run, which a notebook displays.

    `run` is a run, its folder, or its name in `runs`; by default the run that this process records.
    Starts `stepscope ui` on 127.0.0.1 in a child process, which ends with this process. `height` is
    in pixels. Raises RunError for an unknown run, or if the dashboard cannot be started.
    """
    run = run or tracker.current()
    if isinstance(run, str | Path):
        run = open_run(run, runs=runs)
    folder = None if run is None else run.folder
    root = runs_root(None if runs is None else Path(runs)) if folder is None else folder.parent
    server = _servers.get(root)
    if server is None or server.process.poll() is not None:
        server = _servers[root] = _start(root)
    query = urllib.parse.urlencode({} if folder is None else {"run": folder.name})
    return RunPage(f"http://localhost:{server.port}/?{query}", height, server.framed)


def notebook_origins() -> list[str]:
    """Return the origins of the Jupyter server of this kernel.

    Returns [] if it is unknown, or if its pages have another origin: with HTTPS a browser permits
    no frame over HTTP, and JupyterHub serves them by a proxy.
    """
    if any(name.startswith("JUPYTERHUB_") for name in os.environ):
        return []
    with contextlib.suppress(ImportError, KeyError, OSError, ValueError, TypeError):
        folder = importlib.import_module("jupyter_core.paths").jupyter_runtime_dir()
        file = Path(folder) / f"jpserver-{int(os.environ['JPY_PARENT_PID'])}.json"
        server = json.loads(file.read_text())
        port = int(server["port"])
        return [] if server.get("secure") else [f"http://{host}:{port}" for host in HOSTS]
    return []


def _start(root: Path) -> _Server:
    """Start a server and wait until it responds. Raises RunError."""
    port = free_port()
    if port is None:
        raise RunError(f"show: {HOST} has no free port.")
    origins = notebook_origins()
    options = {"port": port, "address": HOST, "headless": "true"}
    words = [word for name, value in options.items() for word in (f"--server.{name}", str(value))]
    variables = {FRAMES: " ".join(origins), END_WITH_STDIN: "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "stepscope.cli", "ui", "--", *words],
            env={**os.environ, "STEPSCOPE_RUNS": str(root), **variables},
            # This pipe is closed at the end of this process, also if killed.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Interrupt Kernel signals the kernel's process group
        )
        listens = False
        try:
            listens = wait_until_it_listens(process.pid, port)
        finally:  # also after Interrupt Kernel
            if not listens:
                process.kill()
                process.communicate()  # closes the pipe
        if not listens:
            log.seek(0)
            text = log.read().decode(errors="replace").strip()[-1000:]
            raise RunError(f"show: the dashboard did not start. {text}")
    return _Server(process, port, bool(origins))
