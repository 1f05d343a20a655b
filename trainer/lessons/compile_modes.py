"""torch.compile: seconds for the first call, then fewer and larger kernels, in three modes."""

import os
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer


def chain(x: torch.Tensor) -> torch.Tensor:
    """Seven operations for each number: eager code goes through the memory seven times."""
    return torch.sigmoid(x * 2 + 1).sqrt() * x.abs() - 0.5


def report(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Print the time of the first call, which compiles, and the median of the later ones."""
    start = time.perf_counter()
    same = torch.allclose(function(x), chain(x), atol=1e-5)
    first = time.perf_counter() - start
    timer = Timer("function(x)", globals={"function": function, "x": x})
    later = timer.blocked_autorange(min_run_time=0.3).median * 1e6
    print(f"{name:16s} first call {first:6.2f} s, later {later:8.1f} µs, same result: {same}")


x = torch.randn(256, 1024, device="cuda" if torch.cuda.is_available() else "cpu")
report("eager", chain)
with tempfile.TemporaryDirectory() as cache:  # else a second run finds the first one's kernels
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    start = time.perf_counter()
    torch.compile(torch.abs)(x)
    print(f"loading the compiler, with a first small kernel: {time.perf_counter() - start:.1f} s")
    for mode in ("default", "reduce-overhead", "max-autotune"):
        torch.compiler.reset()
        report(mode, torch.compile(chain, mode=mode))
