"""Trains on the CPU for some seconds; with "leak" it keeps a metric of each step with its graph."""

import sys
import time

import torch
from torch import nn

SECONDS = 48

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
metrics = []
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    x = torch.randn(256, 256)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    metric = model(x).abs().mean()
    if sys.argv[1:] == ["leak"]:
        metrics.append(metric)
    time.sleep(0.04)
