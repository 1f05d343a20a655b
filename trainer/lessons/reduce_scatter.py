"""reduce_scatter: sums over all ranks, of which each rank keeps one part."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"


def show(text: str) -> None:
    """Print a line in one piece, as the other rank may print too."""
    print(f"rank {rank}: {text}\n", end="")


mine = torch.arange(2.0 * ranks, device=device) + 100 * rank
show(f"gives {mine.tolist()}")
part = torch.zeros(2, device=device)
dist.reduce_scatter(part, list(mine.split(2)))  # part k of the sum goes to rank k
show(f"has its part of the sum: {part.tolist()}")

parts = [torch.zeros(2, device=device) for _ in range(ranks)]
dist.all_gather(parts, part)  # the other half of an all_reduce
both = torch.cat(parts)
dist.all_reduce(mine)
show(f"with an all_gather it is an all_reduce: {torch.equal(both, mine)}")
dist.destroy_process_group()
