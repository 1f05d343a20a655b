"""DataParallel against DistributedDataParallel: the same gradients, another way to them."""

import copy

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = f"cuda:{rank}" if torch.cuda.device_count() >= ranks else "cpu"


def milliseconds(net: torch.nn.Module, x: torch.Tensor) -> float:
    """Return the mean time of ten forward and backward passes; Timer waits for the GPU."""

    def step() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return Timer("step()", globals={"step": step}).timeit(10).mean * 1e3


torch.manual_seed(0)
model, x = torch.nn.Linear(256, 256).to(device), torch.randn(64, 256, device=device)
ddp = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
took = milliseconds(ddp, x.chunk(ranks)[rank])
print(f"rank {rank}: DDP, 1 of {ranks} processes, {took:.2f} ms a pass")
if rank == 0:  # one process for all GPUs: in every pass it copies the model to each of them
    took = milliseconds(torch.nn.DataParallel(model), x)
    # With one GPU DataParallel takes it, and DDP stays on the CPU.
    same = torch.allclose(model.weight.grad.cpu(), ddp.module.weight.grad.cpu(), atol=1e-6)
    print(f"rank 0: DataParallel, {torch.cuda.device_count()} GPUs, {took:.2f} ms a pass")
    print(f"rank 0: the same gradients: {same}")
dist.barrier()  # neither leaves while the other one still works
dist.destroy_process_group()
