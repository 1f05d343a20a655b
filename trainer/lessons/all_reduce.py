"""all_reduce: the sum, or another reduction, over all ranks, on every rank."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="")


x = torch.tensor([1.0, 2.0], device=device) * (rank + 1)
show(f"gives {x.tolist()}")
total = x.clone()
dist.all_reduce(total, dist.ReduceOp.SUM)  # in place
show(f"sum:  {total.tolist()}")
show(f"mean: {(total / ranks).tolist()}, which DDP makes of the gradients")

largest = x.clone()
dist.all_reduce(largest, dist.ReduceOp.MAX)
show(f"max:  {largest.tolist()}")
n = total.numel() * total.element_size()
show(f"{n} bytes; over the link go 2 · (n - 1) / n of them: {2 * (ranks - 1) / ranks * n:.0f}")
dist.destroy_process_group()
