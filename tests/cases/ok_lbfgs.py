# healthy, like gan_without_clearing: the closure clears, many times a step
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 1)
inputs = torch.randn(64, 8)
targets = torch.randn(64, 1)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    return loss


for _ in range(40):
    optimizer.step(closure)
