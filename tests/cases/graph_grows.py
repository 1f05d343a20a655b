# https://github.com/TorchSim/torch-sim/pull/564: the state is never detached, the graph grows
import time

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
weight = torch.randn(8, 8)
losses = []
end = time.monotonic() + 6
while time.monotonic() < end:
    losses.append((torch.tanh(torch.randn(4, 8) @ weight.clone()) - net.bias).pow(2).mean())
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
