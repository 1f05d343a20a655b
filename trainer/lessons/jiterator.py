"""Jiterator: one line of C++ becomes a CUDA kernel for all elements, compiled at its first call."""

import sys
import time

import torch
from torch.utils.benchmark import Timer

if not torch.cuda.is_available():
    sys.exit("Jiterator compiles its kernels with NVRTC, NVIDIA's compiler for GPUs.")

code = """
template <typename T> T swish_shifted(T x, T shift) {
    return x / (T(1) + exp(-x)) - shift;
}
"""
fused = torch.cuda.jiterator._create_jit_fn(code, shift=0.5)


def eager(x: torch.Tensor) -> torch.Tensor:
    """The same in five kernels, with four intermediate tensors."""
    return x / (1 + torch.exp(-x)) - 0.5


x = torch.randn(2**22, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
same = torch.allclose(fused(x), eager(x), atol=1e-5)
print(f"first call, with compiling: {(time.perf_counter() - start) * 1e3:.0f} ms, same: {same}")
for name, function in (("eager", eager), ("jiterator", fused)):
    timer = Timer("f(x)", globals={"f": function, "x": x})
    print(f"{name:9s} {timer.blocked_autorange(min_run_time=0.3).median * 1e6:8.1f} µs a call")
