"""The examples in docstrings and docs/python.md do what they show; paths in documents exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import stepscope
from stepscope.common import formatting

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
PATH = re.compile(
    r"`((?:stepscope|trainer|dashboard|docs|tests|examples|benchmarks)/(?!\.)[\w./-]*)`"
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPSCOPE_RUNS", raising=False)


@pytest.mark.parametrize("module", [stepscope, formatting], ids=lambda module: module.__name__)
def test_docstrings(module: object) -> None:
    found = doctest.testmod(module, optionflags=OPTIONS)  # type: ignore[arg-type]
    assert found.attempted > 0
    assert found.failed == 0


def test_the_page_about_python() -> None:
    found = doctest.testfile(str(PAGE), module_relative=False, optionflags=OPTIONS)
    assert found.attempted > 10
    assert found.failed == 0


def test_the_paths_in_the_documents_exist() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "tests/README.md"]
    named = {(one.name, path) for one in documents for path in PATH.findall(one.read_text())}
    assert len(named) > 15
    assert sorted((name, path) for name, path in named if not (ROOT / path).exists()) == []
