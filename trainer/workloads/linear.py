"""Linear regression of a noisy line: one input, one output."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import RunConfig
from trainer.workloads.task import Task, TensorSplit

SLOPE, INTERCEPT, NOISE = 0.7, 0.3, 0.1
SAMPLES = 1000
PICTURED = 200


def task(config: RunConfig) -> Task:
    """Return the task to fit `y = weight x + bias`; a fifth of the points is for validation."""
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.rand((SAMPLES, 1), generator=generator) * 2 - 1
    y = SLOPE * x + INTERCEPT + NOISE * torch.randn((SAMPLES, 1), generator=generator)
    cut = SAMPLES * 4 // 5
    model = nn.Linear(1, 1)
    return Task(
        model=model,
        train=TensorSplit.of(x[:cut], y[:cut]),
        validation=TensorSplit.of(x[cut:], y[cut:]),
        loss=nn.MSELoss(),
        classifies=False,
        recorded={"model/weight": model.weight, "model/bias": model.bias},
        run_info={
            "data": f"{SAMPLES} points around a line, generated from the seed",
            "fit": {
                "x": x[:PICTURED, 0].tolist(),
                "y": y[:PICTURED, 0].tolist(),
                "slope": SLOPE,
                "intercept": INTERCEPT,
            },
        },
    )
