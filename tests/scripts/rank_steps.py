"""Ranks that take many small steps: rank_steps.py STEPS HOW [PLANTED RANK].

HOW is `ddp` (over gloo), `nccl` (on a GPU each) or `apart` (no rank waits for another). PLANTED is
what happens to RANK at step 20: `sleep` for some seconds, or `end`.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS, HOW = int(sys.argv[1]), sys.argv[2]
PLANTED, RANK = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("", -1)

device = torch.device("cpu")
if HOW == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
torch.manual_seed(0)
model = nn.Linear(8, 1).to(device)
if HOW != "apart":
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    planted = step == 20 and dist.get_rank() == RANK
    if planted and PLANTED == "end":
        break
    if planted and PLANTED == "sleep":
        time.sleep(6 if HOW != "nccl" else 20)
    optimizer.step()
    loss.item()
    time.sleep(0.002)
