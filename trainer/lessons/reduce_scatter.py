"""reduce_scatter and all_gather: a part of the sum for each rank, and all parts for all."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"

mine = torch.arange(2.0 * ranks, device=device) + 100 * rank
print(f"rank {rank}: gives {mine.tolist()}")
part = torch.zeros(2, device=device)
dist.reduce_scatter(part, list(mine.split(2)))  # part k of the sum goes to rank k
print(f"rank {rank}: has its part of the sum: {part.tolist()}")

parts = [torch.zeros(2, device=device) for _ in range(ranks)]
dist.all_gather(parts, part)
both = torch.cat(parts)
print(f"rank {rank}: has all: {both.tolist()}")
dist.all_reduce(mine)
print(f"rank {rank}: both together are an all_reduce: {torch.equal(both, mine)}")

# Tensors must be equally large; of other things the objects are sent, more slowly.
words: list[str | None] = [None] * ranks
dist.all_gather_object(words, "a" * (rank + 1))
print(f"rank {rank}: objects: {words}")
dist.destroy_process_group()
