"""Repositories of git in a temporary folder."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path

GIT = ("git", "-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def commit(top: Path, files: Mapping[str, str]) -> str:
    """Write and commit files in a repository, which is made if missing; return the commit."""
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(top, "init", "--quiet", "--template=", "--initial-branch=main")
    git(top, "add", "--", *files)
    git(top, "commit", "--quiet", "--message=c")
    return git(top, "rev-parse", "HEAD")


def git(top: Path, *words: str) -> str:
    done = subprocess.run([*GIT, *words], cwd=top, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def content(folder: Path) -> dict[str, str]:
    """Return the hash of each file, also below `.git`."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
