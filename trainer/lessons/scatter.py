"""scatter and gather: one rank cuts its data into parts, and collects a tensor of every rank."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"

part = torch.zeros(2, device=device)
parts: list[torch.Tensor] | None = None  # only the rank that sends or collects passes the list
if rank == 0:
    whole = torch.arange(2.0 * ranks, device=device)
    print(f"rank {rank}: has the whole: {whole.tolist()}")
    parts = list(whole.split(2))
dist.scatter(part, parts, src=0)
print(f"rank {rank}: has its part: {part.tolist()}")

dist.gather(part + 10 * rank, parts, dst=0)
if parts is not None:
    print(f"rank {rank}: has all: {[part.tolist() for part in parts]}")
dist.destroy_process_group()
