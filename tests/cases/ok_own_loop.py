# healthy, like python_environment: no DataLoader, and a short simulation beside the computing
import math
import time

import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
states = torch.randn(10_000, 64)
end = time.monotonic() + 4
while time.monotonic() < end:
    score = sum(math.sin(number) for number in range(500))
    chosen = torch.randint(0, len(states), (128,))
    loss = (net(states[chosen]) - score).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
