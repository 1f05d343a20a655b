"""A DDP job over gloo whose rank SLOW sleeps in forward: slow_rank.py STEPS SLOW, -1 for none."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS, SLOW = int(sys.argv[1]), int(sys.argv[2])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.07 if dist.get_rank() == SLOW else 0.03)
        return self.layer(batch)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        sys.stdout.write(f"rank {dist.get_rank()} at step {step}\n")
dist.destroy_process_group()
