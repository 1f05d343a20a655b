"""NVTX: named ranges around the parts of a step, which Nsight Systems draws on its time line."""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit("NVTX marks the time line of a GPU: a build of torch without CUDA leaves it out.")

nvtx = torch.cuda.nvtx
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    with nvtx.range(f"step {step}"):
        with nvtx.range("data"):
            x = torch.rand(64, 256).cuda()
        with nvtx.range("forward"):
            loss = model(x).square().mean()
        with nvtx.range("backward"):
            loss.backward()
        with nvtx.range("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
print(f"5 steps with 5 ranges each, loss {loss.item():.4f}")
print(f"see them: nsys profile --trace cuda,nvtx python {sys.argv[0]}")
