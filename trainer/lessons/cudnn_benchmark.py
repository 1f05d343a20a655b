"""cudnn.benchmark: cuDNN times its convolution algorithms at the first call of each shape."""

import sys
import time

import torch

if not torch.cuda.is_available():
    sys.exit("cuDNN is NVIDIA's library of GPU kernels: a CPU has no such choice to make.")


def milliseconds(calls: int) -> float:
    """Time of one forward and backward pass of the convolution, waiting for the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        conv(images).sum().backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


conv = torch.nn.Conv2d(32, 64, kernel_size=3, padding=1).cuda()
images = torch.rand(16, 32, 32, 32, device="cuda")
milliseconds(3)  # loads the library: neither setting shall pay for that
print("benchmark   first call    later calls")
for enabled in (False, True):
    torch.backends.cudnn.benchmark = enabled
    first, later = milliseconds(1), milliseconds(20)
    print(f"{enabled!s:9s}  {first:8.2f} ms    {later:8.3f} ms")
