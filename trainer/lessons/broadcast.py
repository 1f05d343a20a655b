"""broadcast: one rank's tensor goes to all ranks."""

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


x = torch.arange(4.0, device=device) if rank == 0 else torch.zeros(4, device=device)
show(f"before: {x.tolist()}")
dist.broadcast(x, src=0)  # every rank makes the call; x is overwritten on all but rank 0
show(f"after:  {x.tolist()}")

torch.manual_seed(rank)  # ranks with seeds of their own begin with different weights
weights = torch.randn(2, device=device)
show(f"weights before: {[round(w, 3) for w in weights.tolist()]}")
dist.broadcast(weights, src=0)  # so this is how data-parallel training begins
show(f"weights after:  {[round(w, 3) for w in weights.tolist()]}")
dist.destroy_process_group()
