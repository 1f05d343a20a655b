"""Another revision of a script: resolved, unpacked beside the repository, which is only read."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stepscope.lab.command import UsageError
from stepscope.lab.revision import RevisionError, check_links, moved, repository, resolve, unpack
from stepscope.lab.script_plan import parse_variant
from stepscope.watch.trial import _foreign_module
from tests.support.git_repository import commit, content, git


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository whose first commit is tagged; for reading only."""
    top = tmp_path_factory.mktemp("original").resolve()
    commit(top, {"train.py": "old", "sub/part.py": "1", ".gitignore": "data\n"})
    git(top, "tag", "first")
    commit(top, {"train.py": "new", "more.py": "2"})
    (top / "data").mkdir()
    (top / "data/x.bin").write_text("x")
    return top


@pytest.fixture
def top(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the repository, as the current folder."""
    top = tmp_path.resolve() / "mine"
    shutil.copytree(original, top)
    monkeypatch.chdir(top)
    return top


def test_a_variant_keeps_its_text_and_holds_the_commit(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = git(top, "rev-parse", "first")
    assert parse_variant("rev:first").name == "rev:first"
    assert parse_variant("rev:first").changes == {"rev": first}
    assert parse_variant("rev:main tf32 env:A=1").changes == {
        "rev": git(top, "rev-parse", "HEAD"),
        "with:tf32": True,
        "env:A": "1",
    }
    monkeypatch.chdir(top / "sub")
    assert parse_variant("rev:main~1").changes == {"rev": first}


@pytest.mark.parametrize(
    "revision",
    [
        "none",
        "--output=x",
        "first..main",
        "HEAD:train.py",
    ],
)
def test_what_is_no_commit_is_refused(top: Path, revision: str) -> None:
    before = content(top)
    with pytest.raises(UsageError, match=r"^--variant: rev: '.*Name a commit, branch or tag\.$"):
        parse_variant(f"'rev:{revision}'")
    assert content(top) == before


def test_a_revision_is_unpacked_with_its_links(top: Path, tmp_path: Path) -> None:
    before, tree = content(top), tmp_path / "tree"
    unpack(resolve("first", top), repository(top / "sub"), tree, ["data/x.bin", "more.py"])
    assert {name: (tree / name).read_text() for name in ("train.py", "data/x.bin", "more.py")} == {
        "train.py": "old",
        "data/x.bin": "x",
        "more.py": "2",
    }
    assert (tree / "more.py").is_symlink()
    assert not (tree / ".git").exists()
    assert content(top) == before


def test_a_link_replaces_no_file_and_leads_to_no_other_folder(top: Path, tmp_path: Path) -> None:
    """The revision has a link into a folder that --link makes one of the user's tree."""
    (top / "inner").symlink_to("data/new")
    git(top, "add", "inner")
    git(top, "commit", "--quiet", "--message=c")
    for number, links in enumerate((["sub"], ["data", "data/x.bin"], ["data", "inner/deep/x"])):
        before = content(top)
        with pytest.raises(RevisionError, match="is in the revision"):
            unpack(resolve("main", top), top, tmp_path / str(number), links)
        assert content(top) == before
        assert not (top / "data/new").exists()


def test_a_link_out_of_the_revision_is_not_unpacked(top: Path, tmp_path: Path) -> None:
    (top / "etc").symlink_to("/etc")
    git(top, "add", "etc")
    git(top, "commit", "--quiet", "--message=c")
    with pytest.raises(RevisionError, match="cannot be unpacked"):
        unpack(resolve("main", top), top, tmp_path / "tree", [])
    with pytest.raises(RevisionError, match="cannot be unpacked"):
        unpack("0" * 40, top, tmp_path / "other", [])


@pytest.mark.parametrize("link", ["", ".", "/etc", "../mine", "data/../../x", ".git", "missing"])
def test_a_link_has_to_be_a_path_of_the_repository(original: Path, link: str) -> None:
    with pytest.raises(RevisionError, match=r"^--link: .*\.$"):
        check_links(["data", link], original)


def test_a_path_moves_into_the_revision(top: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    unpack(resolve("first", top), top, tree, [])
    assert moved(top, top, tree) == tree
    assert moved(top / "sub/part.py", top, tree) == tree / "sub/part.py"
    for path in (top / "more.py", tmp_path / "train.py", top / "../train.py"):
        with pytest.raises(RevisionError, match="is not in the re"):
            moved(path, top, tree)


@pytest.mark.parametrize(
    ("file", "foreign"),
    [
        ("mine/part.py", True),
        ("linked/part.py", True),  # a link to the repository
        ("mine/runs/tree/part.py", False),
        ("mine/runs/tree/data/part.py", False),  # below a link of the revision
        ("mine/.venv/lib/part.py", False),
        ("mine/lib/site-packages/part.py", False),
        ("mine2/part.py", False),
    ],
)
def test_modules_of_the_users_tree_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, foreign: bool
) -> None:
    """The tree is inside the repository, as the folders of sweeps are."""
    root = tmp_path.resolve()
    tree = root / "mine/runs/tree"
    (root / "mine/data").mkdir(parents=True)
    tree.mkdir(parents=True)
    (root / "linked").symlink_to(root / "mine")
    (tree / "data").symlink_to(root / "mine/data")
    module, relative = ModuleType("a_part"), ModuleType("relative")
    module.__file__, relative.__file__ = os.path.join(root, file), "_ops.py"
    monkeypatch.chdir(root / "mine")
    with monkeypatch.context() as patch:  # pytest itself needs its modules
        patch.setattr(sys, "modules", {"a_part": module, "relative": relative, "none": None})
        patch.setattr(sys, "prefix", str(root / "mine/.venv"))
        patch.setattr(sys, "base_prefix", str(root))  # contains the repository
        found = _foreign_module(str(root / "mine"), str(tree))
    assert (found is not None) is foreign
    assert found is None or "a_part" in found
