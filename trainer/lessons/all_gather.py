"""all_gather: every rank gets the tensors of all ranks."""

import os

import torch
import torch.distributed as dist

gpus = torch.cuda.device_count() > 1
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)  # all_gather_object() sends over the current GPU
dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
rank, ranks = dist.get_rank(), dist.get_world_size()


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="", flush=True)


mine = torch.tensor([rank + 0.5, rank + 0.25], device=device)
show(f"gives {mine.tolist()}")
parts = [torch.zeros(2, device=device) for _ in range(ranks)]
dist.all_gather(parts, mine)
show(f"has all: {torch.cat(parts).tolist()}")

# Tensors must be equally large; of other things the objects are sent, more slowly.
words: list[str | None] = [None] * ranks
dist.all_gather_object(words, "a" * (rank + 1))
show(f"objects: {words}")
dist.destroy_process_group()
