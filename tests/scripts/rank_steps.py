"""Ranks of a DDP job over gloo that take many small steps: rank_steps.py STEPS [PLANTED RANK].

PLANTED is what happens to RANK at step 20: `sleep` for 20 s, `skip` the optimizer once, or `end`.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(sys.argv[1])
PLANTED = sys.argv[2] if len(sys.argv) > 2 else ""
RANK = int(sys.argv[3]) if PLANTED else -1

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    planted = step == 20 and dist.get_rank() == RANK
    if planted and PLANTED == "sleep":
        time.sleep(20)
    if not (planted and PLANTED == "skip"):
        optimizer.step()
    time.sleep(0.002)
dist.destroy_process_group()
