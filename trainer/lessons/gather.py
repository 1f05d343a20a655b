"""gather: one rank collects a tensor from every rank."""

import os

import torch
import torch.distributed as dist

gpus = torch.cuda.device_count() > 1
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
rank, ranks = dist.get_rank(), dist.get_world_size()


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="", flush=True)


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
