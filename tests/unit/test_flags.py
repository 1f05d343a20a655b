"""Process-wide flags hold for a run and are put back after it, also when it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.backends import cudnn

from trainer.config import Precision, RunConfig
from trainer.training.backend_flags import run_flags


def flags() -> tuple[bool | str, ...]:
    return (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("highest", False, False, False, False, False)),
        ({"precision": Precision.TF32}, ("high", True, False, False, False, False)),
        ({"precision": Precision.BF16}, ("highest", False, False, False, False, False)),
        ({"cudnn_benchmark": True}, ("highest", False, True, False, False, False)),
        ({"deterministic": True}, ("highest", False, False, True, True, False)),
    ],
)
def test_flags_follow_the_configuration_and_are_put_back(
    changes: dict[str, Any], expected: tuple[bool | str, ...]
) -> None:
    before = flags()
    with run_flags(replace(RunConfig(), **changes)):
        assert flags() == expected
    assert flags() == before
    with pytest.raises(ZeroDivisionError), run_flags(replace(RunConfig(), **changes)):
        raise ZeroDivisionError
    assert flags() == before


def test_the_flags_of_a_user_come_back() -> None:
    cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with run_flags(RunConfig()):
            assert flags()[2:] == (False, False, False, False)
        assert flags()[2:] == (True, False, True, True)
    finally:
        cudnn.benchmark = False
        torch.use_deterministic_algorithms(False)
