# healthy, like recompiled_scalar: a few lengths, and one graph for all of them
import torch
from torch import nn

net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
compiled = torch.compile(net, backend="eager")
for step in range(80):
    loss = compiled(torch.ones(8 + step // 15, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
