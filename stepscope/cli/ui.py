"""`stepscope ui`: turns this process into the dashboard of the caller's runs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PROJECT = Path(__file__).resolve().parents[2]
"""Where the page lies in a checkout: app.py, dashboard/ and the .streamlit settings."""


def open_page(runs: Path, arguments: Sequence[str] = (), project: Path = PROJECT) -> int:
    """Become `streamlit run app.py` for the runs under `runs`; return 1 where there is no page.

    Signals and the exit code are Streamlit's own, since no process stands in between.
    """
    missing = page_missing(project)
    if missing is None:
        _become_streamlit(runs, arguments, project)
    print(missing, file=sys.stderr)
    return 1


def _become_streamlit(runs: Path, arguments: Sequence[str], project: Path) -> NoReturn:
    # The page runs in its own folder: a relative path of the caller would mean another place.
    environment = {**os.environ, "STEPSCOPE_RUNS": str(runs.resolve())}
    sys.stdout.flush()
    os.chdir(project)
    command = [sys.executable, "-m", "streamlit", "run", "app.py", *arguments]
    os.execve(sys.executable, command, environment)


def page_missing(project: Path = PROJECT) -> str | None:
    """Say why the page cannot be opened; None when it can."""
    if not (project / "app.py").is_file() or not (project / "dashboard").is_dir():
        return (
            "The dashboard is not part of this installation. Clone the repository and run "
            "'make run', or 'pip install -e .' there and call 'stepscope ui' again."
        )
    for name in ("streamlit", "plotly"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed. Run 'pip install -r {project}/requirements.txt'."
    return None
