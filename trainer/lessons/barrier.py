"""barrier: no rank continues before all have arrived; the cost of waiting."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

print(f"rank {rank}: is process {os.getpid()}, one of {ranks}")
dist.barrier()  # all begin together
began = time.perf_counter()
time.sleep(0.3 * rank)  # rank 1 is late, as by a slow disk
arrived = time.perf_counter()
dist.barrier()
left = time.perf_counter()
print(f"rank {rank}: came after {arrived - began:.1f} s, went on after {left - began:.1f} s")
print(f"rank {rank}: so it waited {left - arrived:.1f} s for the last one")
dist.destroy_process_group()
