"""What this process runs: the name of its script or notebook."""

from __future__ import annotations

import os
import sys


def running_name() -> str:
    """Return the name of the script that this process runs, or of its notebook where known."""
    if not in_notebook():
        return os.path.splitext(_program())[0] or "python"
    # VS Code puts the path into the notebook's namespace, Jupyter into the environment.
    path = vars(sys.modules["__main__"]).get("__vsc_ipynb_file__") or os.environ.get(
        "JPY_SESSION_NAME", ""
    )
    name, ending = os.path.splitext(os.path.basename(str(path)))
    return name if ending == ".ipynb" else "notebook"


def in_notebook() -> bool:
    """Say whether a notebook's kernel runs this process (Jupyter, VS Code, Colab)."""
    return _program().endswith("kernel_launcher.py")


def _program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv else ""
