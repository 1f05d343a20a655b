"""A DDP job over gloo with steps of about 10 ms: `ddp_steps.py STEPS` under torchrun.

A step sleeps most of its time, as a host does that waits for its GPU. Rank 0 prints the median of
its step times.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(sys.argv[1])
WARM_UP = 20
SLEEP_S = 0.008

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(16, 64)
times = []
before = time.perf_counter()
for step in range(STEPS + WARM_UP):
    loss = model(batch).square().mean()
    time.sleep(SLEEP_S)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    now = time.perf_counter()
    if step >= WARM_UP:
        times.append(now - before)
    before = now
if dist.get_rank() == 0:
    sys.stdout.write(f"median_ms={1e3 * statistics.median(times):.4f}\n")
dist.destroy_process_group()
