"""Precision: autocast types, the scaler's pass-through."""

from __future__ import annotations

import torch

from trainer.config import Precision
from trainer.training.precision import autocast, grad_scaler


def test_autocast_acts_only_in_mixed_precision() -> None:
    x = torch.ones(2, 2)
    cpu = torch.device("cpu")
    for precision, expected in [(Precision.FP32, torch.float32), (Precision.BF16, torch.bfloat16)]:
        context = autocast(precision, cpu)
        for _ in range(2):  # the loop enters one context again and again
            with context:
                assert (x @ x).dtype == expected


def test_fp16_has_a_scaler_on_a_cpu_too() -> None:
    scaler = grad_scaler(Precision.FP16, torch.device("cpu"))
    weights = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.5)
    for factor, left, scale in [(1.0, 0.5, 2.0**16), (torch.inf, 0.5, 2.0**15)]:
        optimizer.zero_grad()
        scaler.scale((weights * factor).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        assert (weights.tolist(), scaler.get_scale()) == ([left, left], scale)
