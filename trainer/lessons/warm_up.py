"""The first calls are slow: libraries load, algorithms are chosen, memory is reserved."""

import statistics
import time

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU the first CUDA call also creates a context, which is timed separately.
start = time.perf_counter()
images = torch.rand(4, 3, 32, 32, device=device)
print(f"the first tensor on {device}: {(time.perf_counter() - start) * 1e3:.1f} ms")

layers = torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3)
model = torch.nn.Sequential(*layers).to(device)
times = []
for call in range(12):
    start = time.perf_counter()
    model(images).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()  # else only the launch would be timed
    times.append((time.perf_counter() - start) * 1e3)
    print(f"call {call + 1:2d}: {times[-1]:8.2f} ms")

later = statistics.median(times[2:])
print(f"the first call took {times[0] / later:.1f} times as long as a later one")
print(f"mean with the first two: {sum(times) / 12:.2f} ms, median without: {later:.2f} ms")
