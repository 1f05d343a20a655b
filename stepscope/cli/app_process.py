"""Processes of the dashboard and of its training programs, which this package never imports.

They are the folders dashboard/ and trainer/ of a checkout, or of `stepscope/_app` in an installed
wheel. There only a process that starts here has that folder on its path: in any other process
`import trainer` finds a module of the user, or none.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
APP = _PACKAGE / "_app" if (_PACKAGE / "_app").is_dir() else _PACKAGE.parent
PAGE = ("streamlit", "plotly")
CONFIG = ".streamlit/config.toml"
"""Address, allowed hosts and theme. Streamlit's defaults would open the page to the network."""


def missing(modules: Sequence[str], extra: str, app: Path = APP) -> str | None:
    """Return what prevents a start and how to install it, or None."""
    if not all((app / name).exists() for name in ("app.py", CONFIG, "dashboard", "trainer")):
        return f"The dashboard is not part of this installation. Run {install(extra)}."
    for name in modules:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed. Run {install(extra)}."
    return None


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'stepscope[{extra}]'"


def become_server(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Replace this process by `streamlit run app.py`; does not return.

    It runs in the app's folder. So Streamlit reads the settings of that folder only, never those
    of the caller's folder, and child processes find `trainer`.
    """
    environment = {**os.environ, **variables}
    environment.pop("PYTHONSAFEPATH", None)  # the folder must be on the path
    command = [sys.executable, "-m", "streamlit", "run", "app.py", *arguments]
    sys.stdout.flush()
    os.chdir(APP)
    os.execve(sys.executable, command, environment)


def become_program(module: str, arguments: Sequence[str]) -> int:
    """Replace this process by a program of `trainer`; return 1 if packages are missing.

    It runs in the caller's folder, from which no trainer.py is imported.
    """
    reason = missing(("torch", "scipy"), "train")
    if reason is None:
        paths = [str(APP), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], environment)
    print(reason, file=sys.stderr)
    return 1
