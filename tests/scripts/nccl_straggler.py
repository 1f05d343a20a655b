"""A DDP training over nccl, one rank of which sleeps in forward; prints how often it waits."""
# ruff: noqa: T201

import json
import os
import sys
import time

import cudasim
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, FIRST = int(sys.argv[1]), 60
SLEEP_S = float(sys.argv[2])
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.set_num_threads(1)
dist.init_process_group("nccl")


class Sleeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, inputs):
        hidden = self.first(inputs).relu()
        torch.cuda.synchronize()  # so that the host is no step ahead, and a sleep counts
        time.sleep(0.004 + (SLEEP_S if rank == 1 else 0))
        return self.last(hidden)


torch.manual_seed(0)
model = DistributedDataParallel(Sleeping().cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(steps):
    for _ in range(steps):
        model(torch.randn(8, 16, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train(FIRST)
torch.cuda.synchronize()
with cudasim.counted() as calls:
    train(STEPS)
print(json.dumps({"rank": rank, "waits": cudasim.synchronizations(calls)}), flush=True)
dist.barrier()
dist.destroy_process_group()
