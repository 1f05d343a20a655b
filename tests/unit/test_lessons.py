"""The lessons: all are listed, and use nothing but torch, numpy and the stdlib."""

from __future__ import annotations

import ast
import re
import sys
from itertools import groupby
from pathlib import Path

import pytest

from trainer.lessons import BY_NAME, FOLDER, LESSONS, Lesson


def test_the_command_has_the_whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/my env/stepscope/_app/trainer/lessons")
    monkeypatch.setattr("trainer.lessons.FOLDER", folder)
    assert BY_NAME["matmul"].command == f"python '{folder}/matmul.py'"


def test_every_file_is_listed_once_and_themes_are_contiguous() -> None:
    files = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    assert sorted(lesson.name for lesson in LESSONS) == files
    assert len({lesson.title for lesson in LESSONS}) == len(LESSONS)
    assert list(BY_NAME) == [lesson.name for lesson in LESSONS]
    groups = [theme for theme, _ in groupby(LESSONS, key=lambda lesson: lesson.theme)]
    assert len(groups) == len(set(groups))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_needs_only_torch(lesson: Lesson) -> None:
    source = lesson.path.read_text()
    tree = ast.parse(source)
    known = {"torch", "numpy", *sys.stdlib_module_names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= known
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert str(node.module).partition(".")[0] in known
    assert lesson.name not in known  # Python looks for imports in the folder of the script first
    exits = re.findall(r"if not torch\.cuda\.is_available\(\):\n    sys\.exit\((.*)\)", source)
    expected = [lesson.needs_cuda] if lesson.needs_cuda else []
    assert [ast.literal_eval(text) for text in exits] == expected
    assert not (lesson.needs_cuda and lesson.on_cpu)
