"""Whether any thread of this process captures a CUDA graph, asked from another thread."""

from __future__ import annotations

import sys

STREAMS = 32
"""Streams in torch's pool of each device, handed out in turn (c10/cuda/CUDAStream.h)."""


def captures_anywhere() -> bool:
    """Say whether a stream of torch's pools captures a graph, as `torch.cuda.graph` makes it do.

    torch tells only of the calling thread's stream, so this thread takes each stream of the pool in
    turn: as many as there are, so that the next one handed out is the same as before. It takes less
    than a millisecond a device. The question is no call that a capture forbids. Streams made
    otherwise are not seen.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if torch is None or cuda is None or not cuda.is_initialized():
        return False
    # Where no context is, nothing captures, and taking a stream would make one.
    is_in_use = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _device: True)
    for device in filter(is_in_use, range(cuda.device_count())):
        for _ in range(STREAMS):
            with cuda.stream(cuda.Stream(device)):
                if cuda.is_current_stream_capturing():
                    return True
    return False
