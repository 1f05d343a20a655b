"""scatter: one rank cuts its data into parts, and each rank gets its own."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="")


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
