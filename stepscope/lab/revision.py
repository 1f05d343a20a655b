"""Another revision of a script, unpacked for one trial: neither .git nor the tree is written."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from stepscope.host.git import GitError, git_output


class RevisionError(Exception):
    """A revision that cannot be unpacked; the message has a remedy."""


def resolve(revision: str, cwd: Path) -> str:
    """Return the commit of a revision of the repository around `cwd`. Raises RevisionError."""
    name = f"{revision}^{{commit}}"
    return _git(cwd, "rev-parse", "--verify", "--end-of-options", name, what=revision)


def repository(cwd: Path) -> Path:
    """Return the top folder of the repository around `cwd`. Raises RevisionError."""
    return Path(_git(cwd, "rev-parse", "--show-toplevel", what=str(cwd)))


def unpack(commit: str, top: Path, tree: Path, links: Sequence[str]) -> None:
    """Write the files of a commit into the new folder `tree`, without submodules.

    Each of `links` is a path in `top`, such as ignored data, that `tree` gets as a symbolic link.
    Costs the time and the disk space of a checkout. Raises RevisionError, OSError.
    """
    tree.mkdir()
    try:
        with (
            git_output(top, "archive", "--format=tar", commit, fetches=True) as archive,
            tarfile.open(fileobj=archive, mode="r|") as files,
        ):
            files.extractall(tree, filter="data")
    except (tarfile.TarError, GitError) as error:
        text = f"rev: {commit[:12]} cannot be unpacked ({error}). Check it with git archive"
        raise RevisionError(f"{text} {commit[:12]}.") from error
    for link in links:
        inside = tree / link
        parent = os.path.realpath(inside.parent)  # may lead out of the tree through an earlier link
        if os.path.lexists(inside) or not Path(parent).is_relative_to(os.path.realpath(tree)):
            text = f"--link: {link} is in the revision {commit[:12]} already."
            raise RevisionError(f"{text} Link only paths that are not in it.")
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.symlink_to(top / link)


def check_links(links: Sequence[str], top: Path) -> None:
    """Raise RevisionError if a link is not a path of the working tree of a repository."""
    for link in links:
        parts = Path(link).parts
        if not parts or Path(link).is_absolute() or ".." in parts or parts[0] == ".git":
            text = f"--link: must be a path relative to {top}, without '..' and not .git, got"
            raise RevisionError(f"{text} {link[:120]!r}. Name a file or folder of the repository.")
        if not (top / link).exists():
            text = f"--link: {link[:120]!r} is not in {top}."
            raise RevisionError(f"{text} Name a file or folder that exists.")


def moved(path: Path, top: Path, tree: Path) -> Path:
    """Return where a path of the repository is in `tree`. Raises RevisionError if it is not."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(top)):
        text = f"rev: {path} is not in the repository {top}, so no other revision of it is known."
        raise RevisionError(f"{text} Use another kind of variant.")
    there = tree / real.relative_to(os.path.realpath(top))
    if not there.exists():
        raise RevisionError(f"rev: {path} is not in the revision. Choose one that has it.")
    return there


def _git(cwd: Path, *words: str, what: str) -> str:
    try:
        with git_output(cwd, *words) as output:
            return os.fsdecode(output.read()).strip()
    except GitError as error:
        raise RevisionError(f"rev: {what[:80]!r}: {error}. Name a commit, branch or tag.") from None
