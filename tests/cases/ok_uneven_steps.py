# healthy, like replay_copies: lengths differ from step to step, without a trend
import random
import time

import torch
from torch import nn

random.seed(0)
net = nn.GRU(8, 48, batch_first=True)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
end = time.monotonic() + 4
while time.monotonic() < end:
    outputs, _ = net(torch.randn(16, random.randint(5, 60), 8))
    loss = outputs.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
