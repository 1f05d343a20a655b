"""The lessons: all are listed, short, readable, and use nothing but torch, numpy and the stdlib."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from itertools import groupby
from pathlib import Path

import pytest

from trainer.lessons import BY_NAME, FOLDER, LESSONS, Lesson

LINES, WIDTH = 30, 100
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str) -> set[int]:
    """The numbers of the lines with code: not those of comments, docstrings and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def test_the_command_of_an_installed_lesson_has_its_whole_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BY_NAME["matmul"].command == "python trainer/lessons/matmul.py"
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
def test_a_lesson_is_short_documented_and_needs_only_torch(lesson: Lesson) -> None:
    source = lesson.path.read_text()
    tree = ast.parse(source)
    assert 0 < len(code_lines(source)) <= LINES
    assert max(map(len, source.splitlines())) <= WIDTH
    parts = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    assert all(ast.get_docstring(part) for part in parts)
    assert 40 <= len(lesson.text.split()) <= 90  # one paragraph
    assert "\n" not in lesson.text
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
