"""`stepscope ui`: this process becomes the dashboard of the caller's runs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
"""Folder of a checkout, which has app.py, dashboard/ and the .streamlit settings."""

EXAMPLES = ("stepscope ui", "stepscope ui -- --server.port 8600 --server.headless true")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENT", help="arguments for 'streamlit run'"
    )


def run(options: argparse.Namespace, root: Path, project: Path = PROJECT) -> int:
    """Replace this process by `streamlit run app.py`; return 1 without the dashboard.

    So signals and the exit code are Streamlit's.
    """
    missing = page_missing(project)
    if missing is None:
        # The page runs in the project's folder, where a relative path would be wrong.
        environment = {**os.environ, "STEPSCOPE_RUNS": str(root.resolve())}
        command = [sys.executable, "-m", "streamlit", "run", "app.py", *options.arguments]
        sys.stdout.flush()
        os.chdir(project)
        os.execve(sys.executable, command, environment)  # does not return
    print(missing, file=sys.stderr)
    return 1


def page_missing(project: Path = PROJECT) -> str | None:
    """Return why the page cannot be opened, or None."""
    if not (project / "app.py").is_file() or not (project / "dashboard").is_dir():
        return (
            "The dashboard is not part of this installation. Clone the repository and run "
            "'make run', or 'pip install -e .' there and call 'stepscope ui' again."
        )
    for name in ("streamlit", "plotly"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed. Run 'pip install -r {project}/requirements.txt'."
    return None
