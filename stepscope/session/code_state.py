"""State of a script's code: git commit, uncommitted changes, and imported packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stepscope
from stepscope.common.files import atomic_write
from stepscope.run.metadata import CODE_DIFF, MAX_DIFF_BYTES, MAX_LABEL

log = logging.getLogger(__name__)

GIT_VARIABLE = "STEPSCOPE_GIT"  # 0: git is never started
GIT_LIMIT_S = 5.0  # for each command, such as on a slow network disk
MAX_PACKAGES = 256
_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
# No file of the repository is written, and no program that its configuration names is started.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
_SUBMODULES = "--ignore-submodules=dirty"


class CodeStateReader:
    """Reads the git state of `code` in the thread `stepscope-code`; `close` stops it.

    `describe` receives `git` of run.json, and `folder` the diff, both only in a repository.
    """

    def __init__(self, code: Path, folder: Path, describe: Callable[..., None]) -> None:
        self._code, self._folder, self._describe = code, folder, describe
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="stepscope-code", daemon=True)
        if os.environ.get(GIT_VARIABLE) != "0":
            self._thread.start()

    def close(self, patience_s: float = 1.0) -> None:
        """Wait `patience_s` for the end of the thread, then end its git process."""
        if self._thread.ident is not None:
            self._thread.join(patience_s)
            self._closed = True
            self._thread.join(patience_s)

    def _read(self) -> None:
        try:
            status = self._git(*_STATUS, _SUBMODULES, limit=2**24)
            if status is None:
                return
            lines = status.decode(errors="replace").splitlines()
            facts = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
            if facts.get("branch.oid", "(initial)").startswith("("):
                return  # nothing is committed
            head = facts.get("branch.head", "")
            git: dict[str, Any] = {
                "commit": facts["branch.oid"][:MAX_LABEL],
                "branch": None if head == "(detached)" else head[:MAX_LABEL],
                "dirty": any(not line.startswith("#") for line in lines),
                "diff": False,
            }
            # "--": a file may be named HEAD.
            diff = git["dirty"] and self._git(*_DIFF, _SUBMODULES, "--", limit=MAX_DIFF_BYTES)
            if diff:
                atomic_write(self._folder / CODE_DIFF, diff)
                git["diff"] = True
            self._describe(git=git)
        except (OSError, ValueError) as error:
            log.info("stepscope: the git state is not recorded: %s", error)

    def _git(self, *arguments: str, limit: int) -> bytes | None:
        """Return the output of a git command; None if it fails or has more than `limit` bytes."""
        output, deadline = b"", time.monotonic() + GIT_LIMIT_S
        with subprocess.Popen(
            [*_GIT, *arguments],
            cwd=self._code,
            env=os.environ | _ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal belongs to the script
        ) as process:
            assert process.stdout is not None
            pipe, ready = process.stdout.fileno(), select.poll()
            ready.register(pipe, select.POLLIN)
            while len(output) <= limit and time.monotonic() < deadline and not self._closed:
                if ready.poll(100):  # ms
                    if not (part := os.read(pipe, 2**16)):
                        return output if process.wait() == 0 else None
                    output += part
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the programs that git started, too
        return None


def imported_packages() -> dict[str, str]:
    """Return the versions of the packages that this process has imported, by name.

    A package counts if it is installed and has a version: `numpy`, `sklearn`, `yaml`.
    """
    found = {"stepscope": stepscope.__version__}
    for name, module in sorted(sys.modules.items()):
        facts = getattr(module, "__dict__", {})  # `getattr(module, …)` may import submodules
        file = facts.get("__file__")
        if "." in name or not isinstance(file, str) or "-packages" not in file:
            continue
        version = facts.get("__version__")
        if not isinstance(version, str):
            try:
                version = importlib.metadata.version(name)
            except (importlib.metadata.PackageNotFoundError, ValueError):
                continue
        if len(found) < MAX_PACKAGES and len(name) <= MAX_LABEL:
            found[name] = str(version)[:MAX_LABEL]
    return found
