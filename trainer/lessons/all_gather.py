"""all_gather: every rank gets the tensors of all ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="")


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
