"""scatter: one rank cuts its data into parts, and each rank gets its own."""

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


part = torch.zeros(2, device=device)
if rank == 0:
    whole = torch.arange(2.0 * ranks, device=device)
    show(f"has the whole: {whole.tolist()}")
    dist.scatter(part, list(whole.split(2)), src=0)
else:
    show("has nothing yet")
    dist.scatter(part, src=0)  # only the source gives a list
show(f"has its part: {part.tolist()}")
dist.destroy_process_group()
