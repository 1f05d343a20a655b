"""State of a script's code: git commit, uncommitted changes, and imported packages."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stepscope
from stepscope.common.files import atomic_write
from stepscope.host.git import GitError, git_output
from stepscope.run.info import CODE_DIFF, MAX_DIFF_BYTES, MAX_LABEL

log = logging.getLogger(__name__)

GIT_VARIABLE = "STEPSCOPE_GIT"  # 0: git is never started
MAX_PACKAGES = 256
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
_SUBMODULES = "--ignore-submodules=dirty"


class CodeStateReader:
    """Reads the git state of `code` in the thread `stepscope-code`.

    `describe` receives `git` of run.json, and `folder` the diff, both only in a repository.
    """

    def __init__(self, code: Path, folder: Path, describe: Callable[..., None]) -> None:
        self._code, self._folder, self._describe = code, folder, describe
        self._thread = threading.Thread(target=self._read, name="stepscope-code", daemon=True)
        if os.environ.get(GIT_VARIABLE) != "0":
            self._thread.start()

    def close(self, patience_s: float = 1.0) -> None:
        """Wait `patience_s` for the end of the thread, whose git process has a time limit."""
        if self._thread.ident is not None:
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
        try:
            with git_output(self._code, *arguments) as output:
                found = output.read(limit + 1)
                if len(found) > limit:
                    raise GitError(f"more than {limit} bytes")
        except GitError:
            return None
        return found


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
