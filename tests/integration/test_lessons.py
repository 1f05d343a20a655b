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
    "broadcast": [
        "rank 1: before: [0.0, 0.0, 0.0, 0.0]",
        "rank 1: after:  [0.0, 1.0, 2.0, 3.0]",
    ],
    "scatter": ["rank 0: has its part: [0.0, 1.0]", "rank 1: has its part: [2.0, 3.0]"],
    "gather": ["rank 0: has all: [[0.0, 1.0], [10.0, 11.0]]"],
    "all_reduce": ["rank 0: sum:  [3.0, 6.0]", "rank 1: sum:  [3.0, 6.0]", "rank 1: max:  [2.0"],
    "reduce_scatter": [
        "rank 0: has its part of the sum: [100.0, 102.0]",
        "rank 1: has its part of the sum: [104.0, 106.0]",
        "rank 1: with an all_gather it is an all_reduce: True",
    ],
    "all_gather": ["rank 0: has all: [0.5, 0.25, 1.5, 1.25]", "rank 1: objects: ['a', 'aa']"],
    "all_to_all": ["rank 0: has [0.0, 10.0]", "rank 1: has [1.0, 11.0]", "rank 0: and back: True"],
    "send_recv": [
        "rank 1: after one message: [7.0, 7.0, 7.0]",
        "rank 0: from rank 1 in the ring: [1.0, 1.0, 1.0]",
    ],
    "barrier": ["rank 1: so it waited 0.0 s for the last one"],
    "ddp_by_hand": [
        "rank 1: by hand as by DDP: True",
        "rank 1: as with the whole batch: True",
    ],
    "distributed_sampler": ["together 12 samples of 11", "epoch 1: "],
    "dp_or_ddp": ["rank 1: DDP, 1 of 2 processes", "rank 0: the same gradients: True"],
}
"""What a machine without CUDA prints, beside its own measurements."""


def run(lesson: Lesson, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program as its reader does, in an empty folder."""
    quiet = {"KINETO_LOG_LEVEL": "6"} | ({"OMP_NUM_THREADS": "1"} if lesson.ranks > 1 else {})
    return subprocess.run(
        [sys.executable, *lesson.arguments],
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
