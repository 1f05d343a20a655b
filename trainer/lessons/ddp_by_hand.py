"""Data-parallel training by hand: broadcast the weights, average the gradients."""

import copy

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"

torch.manual_seed(0)
x, y = torch.randn(32, 8, device=device), torch.randn(32, 1, device=device)
my_x, my_y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]  # this rank's part of the batch
model = torch.nn.Linear(8, 1).to(device)
wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
for weights in model.parameters():
    dist.broadcast(weights.data, src=0)
((model(my_x) - my_y).square().mean() / ranks).backward()
for weights in model.parameters():
    dist.all_reduce(weights.grad)  # the sum of all ranks' parts is their mean
(wrapped(my_x) - my_y).square().mean().backward()  # the same, while backward still computes
by_ddp = wrapped.module.weight.grad
print(f"rank {rank}: by hand as by DDP: {torch.allclose(model.weight.grad, by_ddp)}")
model.zero_grad()
(model(x) - y).square().mean().backward()  # one process with the whole batch
print(
    f"rank {rank}: as with the whole batch: {torch.allclose(model.weight.grad, by_ddp, atol=1e-6)}"
)
dist.destroy_process_group()
