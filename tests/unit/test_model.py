"""The model as a run wants it: memory format and number types of weights and inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import Precision, RunConfig
from trainer.training.model import InputFormat, prepare

CPU = torch.device("cpu")
IMAGES = torch.rand(2, 3, 8, 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


def config(**changes: Any) -> RunConfig:
    return replace(RunConfig(), **changes)


@pytest.mark.parametrize("wanted", [True, False])
def test_channels_last_is_the_format_of_weights_and_images(wanted: bool) -> None:
    chosen = config(channels_last=wanted)
    weights = prepare(model(), chosen, CPU)[0].weight  # type: ignore[index]
    images = InputFormat.of(chosen)(IMAGES)
    for part in (weights, images):
        assert part.is_contiguous(memory_format=torch.channels_last) == wanted
        assert part.is_contiguous() != wanted
    flat = torch.rand(2, 5)
    assert InputFormat.of(chosen)(flat) is flat


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(Precision.PURE_BF16, torch.bfloat16), (Precision.PURE_FP16, torch.float16)],
)
def test_pure_precisions_cast_everything_but_batch_norm_and_integers(
    precision: Precision, dtype: torch.dtype
) -> None:
    chosen = config(precision=precision)
    conv, norm, _, linear = prepare(model(), chosen, CPU)  # type: ignore[misc]
    assert {p.dtype for p in (*conv.parameters(), *linear.parameters())} == {dtype}
    assert {p.dtype for p in norm.parameters()} == {norm.running_var.dtype} == {torch.float32}
    form = InputFormat.of(chosen)
    assert form(IMAGES).dtype == dtype
    assert form(torch.arange(3)).dtype == torch.int64
