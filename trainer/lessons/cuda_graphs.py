"""CUDA Graphs: a step of many small kernels is recorded once and replayed with one launch."""

import sys

import torch
from torch.utils.benchmark import Timer

if not torch.cuda.is_available():
    sys.exit("A CUDA graph records launches of GPU kernels: a CPU launches none.")


def step() -> torch.Tensor:
    """Fifty small kernels: the GPU is done with each before the next one is launched."""
    y = x
    for _ in range(50):
        y = y * 1.01
    return y


x = torch.ones(1024, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):  # capture wants a few calls before, on another stream
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = step()  # is recorded, not run; y is where each replay leaves its result
x.fill_(2.0)  # new input goes into the same memory
graph.replay()
print(f"the replay computes with the new input: {torch.equal(y, step())}")
for name, code in (("eager", "step()"), ("graph", "graph.replay()")):
    timer = Timer(code, globals={"step": step, "graph": graph})
    print(f"{name}: {timer.blocked_autorange(min_run_time=0.3).median * 1e6:8.1f} µs a step")
