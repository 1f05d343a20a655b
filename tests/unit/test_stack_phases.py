"""The phase of a step by the frames of a stack."""

from __future__ import annotations

import threading

import pytest

from stepscope.common.stack_phases import is_own_file, stack_phase

TORCH = "/venv/lib/site-packages/torch/"
USER = ("/home/me/train.py", "main")
CALL = (f"{TORCH}nn/modules/module.py", "_call_impl")
BACKWARD = (f"{TORCH}autograd/graph.py", "_engine_run_backward")
REDUCE = (f"{TORCH}distributed/distributed_c10d.py", "all_reduce")


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([USER], None),
        ([USER, BACKWARD, USER], "backward"),
        ([CALL, BACKWARD], "backward"),  # activation checkpointing
        ([(f"{TORCH}autograd/function.py", "apply"), CALL], "forward"),
        ([(f"{TORCH}optim/adam.py", "step")], "optimizer"),
        ([(f"{TORCH}amp/grad_scaler.py", "step")], "optimizer"),
        ([REDUCE, CALL], "communication"),
        ([(f"{TORCH}utils/data/dataloader.py", "__next__")], "input"),
    ],
)
def test_the_innermost_frame_of_torch_names_the_phase(
    frames: list[tuple[str, str]], phase: str | None
) -> None:
    assert stack_phase(frames) == phase


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/me/train.py", True),
        ("/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        (threading.__file__, False),
        ("<frozen runpy>", False),
    ],
)
def test_a_file_of_the_user(file: str, is_own: bool) -> None:
    assert is_own_file(file) is is_own
