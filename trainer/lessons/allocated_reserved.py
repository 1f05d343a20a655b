"""Allocated, reserved and cached memory, step by step: del, gc.collect() and empty_cache()."""

import gc
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("torch counts the memory of its CUDA allocator only: a CPU tensor comes from malloc.")


def show(what: str) -> None:
    """Print the counters in MiB; cached memory is reserved and not allocated."""
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    numbers = (allocated, reserved, reserved - allocated)
    print(f"{what:30s}" + "".join(f"{number / 2**20:10.1f}" for number in numbers))


print(f"{'MiB':30s} allocated  reserved    cached")
show("at the start")
a = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
show("a takes 64 MiB")
del a
show("del a: it goes into the cache")
b = torch.empty(48 * 2**20, dtype=torch.uint8, device="cuda")
show("b of 48 MiB comes from there")
cycle: list[object] = [b]
cycle.append(cycle)  # a list that holds itself
del b, cycle
show("del b: the cycle still holds it")
gc.collect()
show("gc.collect() breaks the cycle")
torch.cuda.empty_cache()
show("empty_cache(): to the driver")
