"""Every lesson runs on a GPU; on the simulator those that do something else there than on a CPU.

The others run on the CPU in `tests/integration/test_lesson_run.py`. The profiler traces no
kernel on the simulator, whose times say nothing.
The lessons of two processes give the same values by NCCL on two GPUs and by gloo on the CPU, which
they choose where there is one GPU: DataParallel then takes that GPU, and DDP does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import SIMULATED
from tests.support.lesson_programs import EXPECTED as ON_CPU
from tests.support.lesson_programs import run
from trainer.lessons import LESSONS, Lesson

EXPECTED = {
    "devices": ["cuda:0 ", "Chosen: cuda:0, which computes"],
    "moving_tensors": ["y is on cuda:0", "same device", "the model's weight is now on cuda:0"],
    "linear_regression": ["step 200: loss 0.00"],
    "seeds": ["equal: True", "the next numbers are the same: True"],
    "matmul": ["  2048  cuda ", "times as fast"],
    "half_tensors": ["         inf       70144", "a @ a on cuda, ms"],
    "amp": ["step left out, scale halved", "output torch.float16, weights torch.float32"],
    "cudnn_benchmark": ["False ", "True "],
    "allocated_reserved": [
        "a takes 64 MiB                      64.0      64.0       0.0",
        "del a: it goes into the cache        0.0      64.0      64.0",
        "b of 48 MiB comes from there        48.0      64.0      16.0",
        "del b: the cycle still holds it      48.0      64.0      16.0",
        "gc.collect() breaks the cycle        0.0      64.0      64.0",
        "empty_cache(): to the driver         0.0       0.0       0.0",
    ],
    "out_of_memory": ["batch  16384: CUDA out of memory.", "16384 of 16384 samples done"],
    "pinned_copies": ["    64  pageable", "    64  pinned"],
    "streams": ["done by then: False", "the result of the side stream is right: True"],
    "warm_up": ["the first tensor on cuda: ", "call 12: "],
    "cuda_graphs": ["the replay computes with the new input: True", "eager: ", "graph: "],
    "compile_modes": ["default ", "reduce-overhead ", "max-autotune "],
    "profiler": ["operator ", "GPU ms", "aten::"],
    "nvtx_ranges": ["5 steps with 5 ranges each"],
} | {lesson.name: ON_CPU[lesson.name] for lesson in LESSONS if lesson.ranks > 1}


USE_CUDA = ("devices", "moving_tensors", "amp", "profiler", "dp_or_ddp")
"""Run on a CPU too, with another result or, for the last, on other devices: of the lessons of two
processes it takes all GPUs that there are.
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "lesson",
    [one for one in LESSONS if not SIMULATED or one.needs_cuda or one.name in USE_CUDA],
    ids=lambda lesson: lesson.name,
)
def test_it_runs_on_a_gpu(lesson: Lesson, tmp_path: Path) -> None:
    ended = run(lesson, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert ended.returncode == 0, ended.stderr
    assert [part for part in EXPECTED[lesson.name] if part not in ended.stdout] == []
    assert "same result: False" not in ended.stdout
    if lesson.name == "dp_or_ddp":
        assert f"DataParallel, {torch.cuda.device_count()} GPUs, " in ended.stdout
    if SIMULATED and lesson.name == "profiler":
        assert "No kernel was traced" in ended.stdout
