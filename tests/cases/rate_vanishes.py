# https://github.com/leftthomas/SRGAN/issues/94
# the schedule is meant for epochs, and called at each step
import torch
from torch import nn

net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: max(0.0, 1 - epoch / 10))
for _ in range(150):
    loss = (net(torch.ones(4, 8)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
