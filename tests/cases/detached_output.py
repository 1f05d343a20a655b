# https://github.com/yifita/deep_cage/issues/16: the output is detached from the weights
import torch
from torch import nn

net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(100):
    outputs = net(torch.ones(4, 8)).detach().requires_grad_()
    loss = (outputs - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
