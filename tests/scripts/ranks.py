"""Two ranks that average their gradients over gloo."""

import sys

import torch
import torch.distributed as dist
from leaving import leave
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    torch.manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for weights in model.parameters():
        dist.all_reduce(weights.grad, dist.ReduceOp.SUM)
    optimizer.step()
dist.barrier()
# In one write: both ranks print into the same pipe, unbuffered.
sys.stdout.write(f"{dist.get_rank()} {loss.item().hex()}\n")
dist.destroy_process_group()
leave()
