"""Processes of the dashboard and of its training programs, which this package never imports.

They are the folders dashboard/ and trainer/ of a checkout, or of `stepscope/_app` in a wheel. Only
a process that starts here has that folder on its path: in any other process `import trainer` finds
a module of the user, or none.
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
NEEDS = {
    "trainer.lab": ("torch", "scipy"),
    "trainer.workloads.digit_images": ("torch", "sklearn", "PIL"),
}
_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}
CONFIG = ".streamlit/config.toml"
"""Address, allowed hosts and theme. Streamlit's defaults would open the page to the network."""


def missing(modules: Sequence[str], app: Path = APP) -> str | None:
    """Return what prevents a start and how to install it, or None."""
    if not all((app / name).exists() for name in ("app.py", CONFIG, "dashboard", "trainer")):
        return "The dashboard is not part of this installation. Install Stepscope again."
    absent = [_PACKAGES.get(name, name) for name in modules if not importlib.util.find_spec(name)]
    if not absent:
        return None
    # The packages, as pip finds an extra neither in a checkout nor in an installed wheel.
    return f"Not installed: {', '.join(absent)}. Run pip install {' '.join(absent)}."


def _search_path(*first: str) -> str:
    """Return PYTHONPATH after `first`, with absolute folders for a process in another folder."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*first, *map(os.path.abspath, filter(None, given))])


def become_server(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Replace this process by `streamlit run app.py`; does not return.

    It runs in the app's folder. So Streamlit reads the settings of that folder only, never those
    of the caller's folder, and child processes find `trainer`.
    """
    environment = {**os.environ, **variables}
    if path := _search_path():
        environment["PYTHONPATH"] = path
    environment.pop("PYTHONSAFEPATH", None)  # the folder must be on the path
    command = [sys.executable, "-m", "streamlit", "run", "app.py", *arguments]
    sys.stdout.flush()
    os.chdir(APP)
    os.execve(sys.executable, command, environment)


def become_program(module: str, arguments: Sequence[str]) -> int:
    """Replace this process by a program of `trainer`; return 1 if packages are missing.

    It runs in the caller's folder, from which no trainer.py is imported.
    """
    reason = missing(NEEDS[module])
    if reason is None:
        environment = {**os.environ, "PYTHONPATH": _search_path(str(APP))}
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], environment)
    print(reason, file=sys.stderr)
    return 1
