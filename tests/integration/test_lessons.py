"""Every lesson runs for real on a CPU; those that need CUDA end with the sentence why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.lessons import LESSONS, Lesson

EXPECTED = {
    "devices": ["Chosen: cpu, which computes [1.0, 1.0, 1.0] + 1 = [2.0, 2.0, 2.0]"],
    "moving_tensors": ["x + y fails: ", "the model's weight is now on meta"],
    "autograd": ["backward():       8.0", "adds its gradient: 16.0", "right again: 8.0"],
    "linear_regression": ["autograd -0.9", "by hand -0.9", "step 200: loss 0.00"],
    "seeds": ["equal: True", "the next numbers are the same: True"],
    "matmul": ["  2048  cpu "],
    "half_tensors": ["70 000 becomes               70000         inf       70144"],
    "amp": [
        "step  0: loss ",
        "step left out, scale halved",
        "step 60: loss 0.0",
        "output torch.float16, weights torch.float32",
    ],
    "warm_up": ["call 12: ", "times as long as a later one"],
    "compile_modes": ["eager ", "default ", "reduce-overhead ", "max-autotune "],
    "profiler": ["operator ", "aten::"],
}
"""What a machine without CUDA prints, beside its own measurements."""


def run(lesson: Lesson, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program as its reader does, in an empty folder."""
    quiet = {"KINETO_LOG_LEVEL": "6"}
    return subprocess.run(
        [sys.executable, str(lesson.path)],
        cwd=folder,
        env=os.environ | quiet | variables,
        capture_output=True,
        text=True,
        check=False,
    )


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
    assert [part for part in EXPECTED[lesson.name] if part not in ended.stdout] == []
    assert "same result: False" not in ended.stdout


def test_compiling_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    lesson = next(lesson for lesson in LESSONS if lesson.name == "compile_modes")
    ended = run(lesson, tmp_path, PATH=str(tmp_path))
    assert ended.returncode == 1
    assert "apt install g++" in ended.stderr
