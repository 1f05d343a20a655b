"""The examples in docstrings and in docs/python.md do what they show."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import stepscope
from stepscope.common import formatting

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
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
