"""send and recv: a message from one rank to one other, and how not to wait for it."""

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"

x = torch.full((3,), float(rank), device=device)
if rank == 0:
    dist.send(x + 7, dst=1)  # returns when x may be changed
elif rank == 1:
    dist.recv(x, src=0)  # waits until the message is there
print(f"rank {rank}: after one message: {x.tolist()}")

# A ring: all send and receive at once. With send() first everywhere, each could wait for ever.
x = torch.full((3,), float(rank), device=device)
got = torch.zeros(3, device=device)
right, left = (rank + 1) % ranks, (rank - 1) % ranks
swap = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, got, left)]
for work in dist.batch_isend_irecv(swap):
    work.wait()
print(f"rank {rank}: from rank {left} in the ring: {got.tolist()}")
dist.destroy_process_group()
