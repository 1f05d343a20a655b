"""torch.profiler: which operators the time of a training step goes to, and their memory."""

import torch
from torch.profiler import profile, record_function

device = "cuda" if torch.cuda.is_available() else "cpu"
layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)
model = torch.nn.Sequential(*layers).to(device)
images = torch.rand(64, 3, 32, 32, device=device)


def step() -> None:
    """One training step in named parts; each name becomes a row of the table."""
    with record_function("part: forward"):
        loss = model(images).square().mean()
    with record_function("part: backward"):
        loss.backward()


for _ in range(3):  # without the first calls, which also load and choose
    step()
with profile(profile_memory=True) as profiled:
    for _ in range(5):
        step()
rows = sorted(profiled.key_averages(), key=lambda row: -row.self_cpu_time_total)
print(f"{'operator':36s} calls  CPU ms     MiB" + "  GPU ms" * (device == "cuda"))
for row in rows[:12]:  # self: without the operators that this one calls
    memory = (row.self_cpu_memory_usage + row.self_device_memory_usage) / 2**20
    print(f"{row.key[:36]:36s} {row.count:5d} {row.self_cpu_time_total / 1e3:7.2f}", end="")
    gpu = f" {row.self_device_time_total / 1e3:7.2f}" if device == "cuda" else ""
    print(f" {memory:z7.1f}{gpu}")
if device == "cuda" and not any(row.self_device_time_total for row in rows):
    print("No kernel was traced: access to the GPU's performance counters may be restricted.")
