"""One matrix multiplication at several sizes, on the CPU and, where there is one, on the GPU."""

import torch
from torch.utils.benchmark import Timer

devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
threads = torch.get_num_threads()
print(f"fp32, CPU with {threads} threads; median of the calls within 0.3 s")
print("  size  device        ms    GFLOP/s")
for size in (128, 256, 512, 1024, 2048):
    times = {}
    for device in devices:
        a = torch.rand(size, size, device=device)
        # Timer warms up, and waits for the GPU: a launch alone would be over in microseconds.
        timer = Timer("a @ a", globals={"a": a}, num_threads=threads)
        seconds = times[device] = timer.blocked_autorange(min_run_time=0.3).median
        # Each of the size² results is a sum of `size` products: one multiplication, one addition.
        rate = 2 * size**3 / seconds / 1e9
        print(f"  {size:4d}  {device:6s}  {seconds * 1e3:8.3f}  {rate:9.1f}")
    if len(times) == 2:
        print(f"        the GPU is {times['cpu'] / times['cuda']:.1f} times as fast")
