"""DistributedSampler: each rank gets a new share of the data in each epoch."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="")


data: Any = list(range(10, 21))  # 11 samples, which do not divide by 2
sampler: Any = DistributedSampler(data, shuffle=True, seed=0)  # asks the group for rank and ranks
for epoch in range(2):
    sampler.set_epoch(epoch)  # without it each epoch has the order of the first
    batches: Any = DataLoader(data, batch_size=3, sampler=sampler)
    show(f"epoch {epoch}: {[batch.tolist() for batch in batches]}")
shares: list[list[int] | None] = [None] * ranks
dist.all_gather_object(shares, [data[index] for index in sampler])
seen = sorted(value for share in shares for value in share)
twice = {value for value in seen if seen.count(value) > 1}
show(f"together {len(seen)} samples of {len(data)}; taken twice to be equally many: {twice}")
dist.destroy_process_group()
