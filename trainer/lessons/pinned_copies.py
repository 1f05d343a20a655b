"""Copies to the GPU from pageable and from pinned memory, in GB/s."""

import sys
import time

import torch

if not torch.cuda.is_available():
    sys.exit("Pinned memory serves copies to a GPU: on a CPU there is nothing to copy.")


def ten_copies(source: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Seconds until the calls have returned, and until all copies have arrived."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source, non_blocking=True)
    returned = time.perf_counter() - start
    torch.cuda.synchronize()
    return returned, time.perf_counter() - start


print("   MiB  memory       GB/s   share that Python waits")
for mib in (1, 16, 64):
    pageable = torch.ones(mib * 2**20, dtype=torch.uint8)
    target = torch.empty_like(pageable, device="cuda")
    for name, source in (("pageable", pageable), ("pinned", pageable.pin_memory())):
        ten_copies(source, target)  # warm-up
        returned, arrived = ten_copies(source, target)
        rate = 10 * source.nbytes / arrived / 1e9
        print(f"  {mib:4d}  {name:8s} {rate:8.1f}   {returned / arrived:.0%}")
