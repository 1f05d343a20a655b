# https://github.com/summerlvsong/Aggregation-Cross-Entropy/issues/2: the logarithm of a share of 0
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(80):
    inputs = torch.randn(16, 8)
    shares = net(inputs).softmax(1).mean(0)
    if step == 50:
        shares = shares * torch.tensor([1.0, 1.0, 1.0, 0.0])
    loss = -shares.log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
