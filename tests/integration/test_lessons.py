"""Every lesson runs for real on a CPU; those that need CUDA end with the sentence why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.lesson_programs import EXPECTED, run
from trainer.lessons import LESSONS, Lesson
from trainer.runners.child_process import OUTPUT_LIMIT


@pytest.mark.timeout(400)  # compiling takes half a minute, on a busy machine much longer
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_it_runs_on_a_cpu_or_says_why_not(lesson: Lesson, tmp_path: Path) -> None:
    ended = run(lesson, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert list(tmp_path.iterdir()) == []
    if lesson.needs_cuda:
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.strip() == lesson.needs_cuda
        return
    if lesson.name == "compile_modes" and not shutil.which("g++"):
        assert "needs a C++ compiler" in ended.stderr
        return
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) >= 4
    assert len(ended.stdout.encode()) <= OUTPUT_LIMIT
    assert [part for part in EXPECTED[lesson.name] if part not in ended.stdout] == []
    assert "same result: False" not in ended.stdout


def test_compiling_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    lesson = next(lesson for lesson in LESSONS if lesson.name == "compile_modes")
    ended = run(lesson, tmp_path, PATH=str(tmp_path))
    assert ended.returncode == 1
    assert "apt install g++" in ended.stderr
