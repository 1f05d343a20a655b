"""all_to_all: every rank sends another part to each rank: a transpose."""

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


mine = torch.arange(float(ranks), device=device) + 10 * rank
show(f"gives {mine.tolist()}: element k is for rank k")
got = torch.zeros(ranks, device=device)
dist.all_to_all_single(got, mine)
show(f"has {got.tolist()}: element k came from rank k")

back = torch.zeros(ranks, device=device)
dist.all_to_all_single(back, got)  # a second time puts everything back
show(f"and back: {torch.equal(back, mine)}")
dist.destroy_process_group()
