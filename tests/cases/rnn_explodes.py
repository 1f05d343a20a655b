# https://github.com/horenbergerb/BernoulliDiffusion/issues/15
# gradients explode in a long recurrence
import torch
from torch import nn

torch.manual_seed(0)
net = nn.RNN(4, 32, nonlinearity="relu", batch_first=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for _ in range(100):
    inputs = torch.randn(8, 20, 4)
    outputs, _ = net(inputs)
    loss = (outputs.sum((1, 2)) - inputs.sum((1, 2))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
