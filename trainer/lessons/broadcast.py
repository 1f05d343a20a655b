"""broadcast: one rank's tensor goes to all ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"

x = torch.arange(4.0, device=device) if rank == 0 else torch.zeros(4, device=device)
print(f"rank {rank}: before: {x.tolist()}")
dist.broadcast(x, src=0)  # every rank makes the call; x is overwritten on all but rank 0
print(f"rank {rank}: after:  {x.tolist()}")

torch.manual_seed(rank)  # ranks with seeds of their own begin with different weights
weights = torch.randn(2, device=device)
print(f"rank {rank}: weights before: {[round(w, 3) for w in weights.tolist()]}")
dist.broadcast(weights, src=0)  # so this is how data-parallel training begins
print(f"rank {rank}: weights after:  {[round(w, 3) for w in weights.tolist()]}")
dist.destroy_process_group()
