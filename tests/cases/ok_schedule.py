# healthy, like rate_vanishes: a warm-up from 0 and a cosine to 0, the last epoch of which is at 0
import math

import torch
from torch import nn

net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def factor(epoch):
    return epoch / 2 if epoch < 2 else (1 + math.cos(math.pi * (epoch - 2) / 7)) / 2


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
for _ in range(10):
    for _ in range(30):
        loss = (net(torch.randn(4, 8)) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
