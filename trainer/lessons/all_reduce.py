"""all_reduce: the sum, or another reduction, over all ranks, on every rank."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"

x = torch.tensor([1.0, 2.0], device=device) * (rank + 1)
print(f"rank {rank}: gives {x.tolist()}")
total = x.clone()
dist.all_reduce(total, dist.ReduceOp.SUM)  # in place
print(f"rank {rank}: sum:  {total.tolist()}")
print(f"rank {rank}: mean: {(total / ranks).tolist()}, which DDP makes of the gradients")

largest = x.clone()
dist.all_reduce(largest, dist.ReduceOp.MAX)
print(f"rank {rank}: max:  {largest.tolist()}")
dist.destroy_process_group()
