"""DistributedSampler: each rank gets a new share of the data in each epoch."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

data: Any = list(range(10, 21))  # 11 samples, which do not divide by 2
sampler: Any = DistributedSampler(data, shuffle=True, seed=0)  # asks the group for rank and ranks
for epoch in range(2):
    sampler.set_epoch(epoch)  # without it each epoch has the order of the first
    batches: Any = DataLoader(data, batch_size=3, sampler=sampler)
    print(f"rank {rank}: epoch {epoch}: {[batch.tolist() for batch in batches]}")
count = len(sampler)  # the order begins again until all ranks have equally many
print(f"rank {rank}: {count} of {len(data)} samples; {ranks} ranks take {ranks * count}")
dist.destroy_process_group()
