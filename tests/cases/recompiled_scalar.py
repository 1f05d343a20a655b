# https://github.com/pytorch/pytorch/issues/171320: a number of Python changes at each step
import torch
from torch import nn

torch._dynamo.config.recompile_limit = 100
torch._dynamo.config.specialize_float = True
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)


@torch.compile(backend="eager")
def compute_loss(inputs, temperature):
    return (net(inputs) * temperature).pow(2).mean()


for step in range(25):
    loss = compute_loss(torch.ones(8, 4), 1 - step / 100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
