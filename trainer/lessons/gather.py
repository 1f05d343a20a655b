"""gather: one rank collects a tensor from every rank."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="")


mine = torch.tensor([10.0 * rank, 10.0 * rank + 1], device=device)
show(f"gives {mine.tolist()}")
if rank == 0:
    parts = [torch.zeros(2, device=device) for _ in range(ranks)]  # room for each rank's tensor
    dist.gather(mine, parts, dst=0)
    show(f"has all: {[part.tolist() for part in parts]}")
else:
    dist.gather(mine, dst=0)
    show("has only its own: the others' went to rank 0")
dist.destroy_process_group()
