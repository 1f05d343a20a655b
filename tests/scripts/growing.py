"""Trains on the CPU: growing.py SECONDS [leak], which keeps a metric of each step."""

import sys
import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
metrics = []
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    x = torch.randn(256, 256)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    metric = model(x).abs().mean()
    if sys.argv[2:] == ["leak"]:
        metrics.append(metric)
    time.sleep(0.02)
