"""all_to_all: every rank sends another part to each rank: a transpose."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"

mine = torch.arange(float(ranks), device=device) + 10 * rank
print(f"rank {rank}: gives {mine.tolist()}: element k is for rank k")
got = torch.zeros(ranks, device=device)
dist.all_to_all_single(got, mine)
print(f"rank {rank}: has {got.tolist()}: element k came from rank k")

back = torch.zeros(ranks, device=device)
dist.all_to_all_single(back, got)  # a second time puts everything back
print(f"rank {rank}: and back: {torch.equal(back, mine)}")
dist.destroy_process_group()
