"""Environment of a run for run.json: program, versions (also the supported ones of torch), host."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import operator
import os
import platform
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.host.git import GitError, git_output

log = logging.getLogger(__name__)

OLDEST, NEWEST = (2, 6), (2, 15)
"""README.md and docs/watch.md name the same range; docs/watch.md lists the tests that ran."""
SUPPORTED = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))


def environment(driver: str | None, gpu: str | None, code: Path | None) -> dict[str, Any]:
    """Return JSON values; None for missing or unknown entries.

    `gpu` is the name of the training GPU, `code` a folder whose git commit is recorded. torch is
    used only if the program has imported it.
    """
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        **torch_versions(),
        "cudnn": _query(torch, "backends.cudnn.version") if gpu else None,
        "driver": driver,
        "gpu": gpu,
        "cpu": cpu_name(),
        "cores": granted_cores(),
        "threads": _query(torch, "get_num_threads"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "commit": None if code is None else _commit(code),
    }


_BINDING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}


def granted_cores() -> int:
    """Return the cores that this process may use: fewer than the machine's in many Slurm jobs."""
    # OpenMP that binds threads gives the main thread a single core.
    binds = _BINDING & os.environ.keys()
    return os.cpu_count() or 1 if binds else len(os.sched_getaffinity(0))


def torch_versions() -> dict[str, Any]:
    """Return the versions of torch and its CUDA; None before torch is imported."""
    torch = sys.modules.get("torch")
    return {
        "torch": getattr(torch, "__version__", None),
        "cuda": getattr(getattr(torch, "version", None), "cuda", None),
    }


@functools.cache  # because it searches the folders of all packages
def installed_torch() -> str | None:
    """Return the version of the installed torch without importing torch; None without torch."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return None


def unsupported(version: str) -> str | None:
    """Return a sentence about a torch outside the range; None for a supported or unknown version.

    >>> unsupported("2.15.0+cu130")
    """
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or OLDEST <= tuple(map(int, number.groups())) <= NEWEST:
        return None
    return (
        f"torch {version} is not supported, only {SUPPORTED}: "
        "training is not affected, but metrics may be missing."
    )


@functools.cache
def warn_if_unsupported(version: str) -> None:
    """Log the sentence of `unsupported` once per process."""
    sentence = unsupported(version)
    if sentence is not None:
        log.warning("stepscope: %s", sentence)


@functools.cache  # on a host of many cores the kernel takes some 10 ms to write this file
def cpu_name() -> str:
    """Return the CPU's model name; "CPU" if the kernel lists none, as on ARM."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _query(torch: Any, function: str) -> Any:
    """Call a function of torch; return None if it is missing or fails."""
    try:
        call: Callable[[], Any] = operator.attrgetter(function)(torch)
        return call()
    except Exception:  # noqa: BLE001 - such as a cuDNN that does not fit; torch may be half imported
        return None


def _commit(code: Path) -> str | None:
    """Return the git commit of the folder; None for a copy without git."""
    try:
        with git_output(code, "rev-parse", "HEAD") as output:
            return output.read().decode().strip()
    except GitError:
        return None


def running_name() -> str:
    """Return the name of this process's script, or of its notebook if known."""
    if not in_notebook():
        return os.path.splitext(_program())[0] or "python"
    # VS Code puts the path into the notebook's namespace, Jupyter into the environment.
    path = vars(sys.modules["__main__"]).get("__vsc_ipynb_file__") or os.environ.get(
        "JPY_SESSION_NAME", ""
    )
    name, ending = os.path.splitext(os.path.basename(str(path)))
    return name if ending == ".ipynb" else "notebook"


def running_folder() -> Path:
    """Return the folder of this process's script; the working directory of a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path.cwd() if file is None or in_notebook() else Path(file).absolute().parent


def in_notebook() -> bool:
    """Return True if a notebook's kernel runs this process (Jupyter, VS Code, Colab)."""
    return _program().endswith("kernel_launcher.py")


def _program() -> str:
    return os.path.basename(sys.argv[0]) if sys.argv else ""
