"""A loop of accelerate that evaluates with gradients on while fetching, as its examples do.

Prints the epoch and the samples of every step.
"""
# ruff: noqa: T201

import json

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4


def data(rows):
    return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), BATCH)


torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = accelerate.Accelerator(cpu=True)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer, training, validation = accelerator.prepare(net, optimizer, data(18), data(10))
for epoch in (1.0, 2.0, 3.0):
    for x, y in training:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
        print(json.dumps({"epoch": epoch, "samples": len(x)}))
    for x, _ in validation:
        with torch.no_grad():
            net(x)
