# healthy, like rnn_explodes: the loss grows by much at each restart of the rate, and stays finite
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(120):
    if step % 40 == 39:
        with torch.no_grad():
            net.weight.mul_(50)
    loss = (net(torch.randn(32, 8)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
