"""Lessons as programs: made-up ones, and what the real ones print."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer.lessons
from tests.support.child_process import run_python
from trainer.lessons import Lesson

CompletedProcess = subprocess.CompletedProcess[str]
Write = Callable[..., Lesson]
SLEEP = "import time\nprint('begun')\ntime.sleep(60)\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Make a lesson of this program."""
    monkeypatch.setattr(trainer.lessons, "FOLDER", tmp_path)

    def lesson(program: str, limit_s: float = 30.0, name: str = "program") -> Lesson:
        (tmp_path / f"{name}.py").write_text(program)
        return Lesson(name=name, theme="", title=name, text="", limit_s=limit_s)

    return lesson


EXPECTED = {
    "devices": ["Chosen: cpu, which computes [1.0, 1.0, 1.0] + 1 = [2.0, 2.0, 2.0]"],
    "moving_tensors": ["x + y fails: ", "the model's weight is now on meta"],
    "linear_regression": ["autograd -0.9", "by hand -0.9", "step 200: loss 0.00"],
    "seeds": ["equal: True", "the next numbers are the same: True"],
    "matmul": ["  2048  cpu "],
    "half_tensors": ["70 000 becomes               70000         inf       70144"],
    "amp": ["step left out, scale halved", "output torch.float16, weights torch.float32"],
    "warm_up": ["call 12: ", "times as long as a later one"],
    "compile_modes": ["eager ", "default ", "reduce-overhead ", "max-autotune "],
    "profiler": ["operator ", "aten::"],
    "broadcast": ["rank 1: before: [0.0, 0.0, 0.0, 0.0]", "rank 1: after:  [0.0, 1.0, 2.0, 3.0]"],
    "scatter": [
        *("rank 0: has its part: [0.0, 1.0]", "rank 1: has its part: [2.0, 3.0]"),
        "rank 0: has all: [[0.0, 1.0], [12.0, 13.0]]",
    ],
    "all_reduce": ["rank 0: sum:  [3.0, 6.0]", "rank 1: sum:  [3.0, 6.0]", "rank 1: max:  [2.0"],
    "reduce_scatter": [
        *("rank 1: has its part of the sum: [104.0, 106.0]", "an all_reduce: True"),
        *("rank 0: has all: [100.0, 102.0, 104.0, 106.0]", "rank 1: objects: ['a', 'aa']"),
    ],
    "all_to_all": ["rank 0: has [0.0, 10.0]", "rank 1: has [1.0, 11.0]", "rank 0: and back: True"],
    "send_recv": ["message: [7.0, 7.0, 7.0]", "from rank 1 in the ring: [1.0, 1.0, 1.0]"],
    "barrier": ["rank 1: so it waited 0.0 s for the last one"],
    "ddp_by_hand": ["rank 1: by hand as by DDP: True", "rank 1: as with the whole batch: True"],
    "distributed_sampler": ["6 of 11 samples; 2 ranks take 12", "epoch 1: "],
    "dp_or_ddp": ["rank 1: DDP, 1 of 2 processes", "rank 0: the same gradients: True"],
}
"""What a machine without CUDA prints, beside its own measurements."""


def run(lesson: Lesson, folder: Path, **variables: str) -> CompletedProcess:
    """Run the program as its reader does, in an empty folder."""
    quiet = {"KINETO_LOG_LEVEL": "6"} | ({"OMP_NUM_THREADS": "1"} if lesson.ranks > 1 else {})
    words = lesson.arguments
    return run_python(*words, cwd=folder, timeout_s=lesson.limit_s, **(quiet | variables))
