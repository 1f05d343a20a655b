# https://github.com/pytorch/tutorials/issues/77: later steps of the agent are slower
import time

import numpy
import torch
from torch import nn

generator = numpy.random.default_rng(0)
net = nn.Linear(4, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
memory = []
end = time.monotonic() + 5
while time.monotonic() < end:
    memory += [tuple(generator.random(4)) for _ in range(200)]
    states = torch.tensor(numpy.array(memory), dtype=torch.float32)
    batch = states[torch.randint(0, len(states), (32,))]
    loss = net(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
