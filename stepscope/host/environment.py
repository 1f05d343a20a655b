"""Describe what a run runs on, for run.json: program, versions, driver, host, commit."""

from __future__ import annotations

import functools
import operator
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def environment(driver: str | None, gpu: str | None, code: Path | None) -> dict[str, Any]:
    """Return JSON values; None for what does not exist here, or is not known yet.

    `gpu` is the name of the GPU that trains, `code` a folder whose git commit is recorded. torch is
    used only if the program has imported it.
    """
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "torch": getattr(torch, "__version__", None),
        "cuda": getattr(getattr(torch, "version", None), "cuda", None),
        "cudnn": _asked(torch, "backends.cudnn.version") if gpu else None,
        "driver": driver,
        "gpu": gpu,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": _asked(torch, "get_num_threads"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "commit": None if code is None else _commit(code),
    }


@functools.cache  # on a machine of many cores the kernel takes some 10 ms to write this file
def cpu_name() -> str:
    """Return the CPU's model as the kernel names it; "CPU" where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _asked(torch: Any, function: str) -> Any:
    """Call a function of torch; None where this torch has none, or it fails."""
    try:
        call: Callable[[], Any] = operator.attrgetter(function)(torch)
        return call()
    except Exception:  # noqa: BLE001 - such as a cuDNN that does not fit; torch may be half imported
        return None


def _commit(code: Path) -> str | None:
    """Return the git commit that the folder is at; None for a copy without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=code,
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


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
    """Return True if a notebook's kernel runs this process (Jupyter, VS Code, Colab)."""
    return _program().endswith("kernel_launcher.py")


def _program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv else ""
