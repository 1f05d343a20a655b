"""A model that torch wraps for the ranks of a job: what it gives to collectives is known.

`collectives.py BACKEND STEPS WIDTH` takes at least STEPS × 10 ms. Rank 0 prints the bytes of all
gradients and of all buffers, and on the CUDA simulator how often the steps waited for the device.
"""

import importlib.util
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

backend, steps, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group(backend)
device = torch.device("cpu" if backend == "gloo" else f"cuda:{dist.get_rank()}")
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.manual_seed(0)
layers = nn.Linear(32, width), nn.BatchNorm1d(width), nn.Linear(width, 8)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 32, device=device)


def train(count: int) -> None:
    for _ in range(count):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)


train(10)  # DDP orders its buckets anew after the first step
simulated = device.type == "cuda" and importlib.util.find_spec("cudasim") is not None
cudasim = importlib.import_module("cudasim") if simulated else None
with cudasim.counted() if cudasim else nullcontext() as calls:
    train(steps)
waits = cudasim.synchronizations(calls) if cudasim else 0
gradients = sum(p.numel() * p.element_size() for p in model.parameters())
buffers = sum(b.numel() * b.element_size() for b in model.buffers())
if dist.get_rank() == 0:
    sys.stdout.write(f"{gradients} {buffers} {waits}\n")
dist.barrier()
dist.destroy_process_group()
