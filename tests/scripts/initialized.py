"""Trains on the CPU for two seconds with `stepscope.init`, which is given no model."""

import time

import torch
from torch import nn

import stepscope

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model[1].parameters())
rec = stepscope.init("parts")
end = time.monotonic() + 2.5
while time.monotonic() < end:
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    rec.step(loss=loss)
