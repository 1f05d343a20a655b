"""Two ranks, of which the second one fails, or is "killed" while the first one pauses."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == 5 and "killed" in sys.argv:
        signal.pause() if dist.get_rank() == 0 else os.kill(os.getpid(), signal.SIGKILL)
    if step == 5 and dist.get_rank() == 1:
        raise ValueError("the data of rank 1 is broken")
    for weights in model.parameters():
        dist.all_reduce(weights.grad, dist.ReduceOp.SUM)
    optimizer.step()
