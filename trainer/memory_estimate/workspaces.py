"""Memory that an operation takes beside its results: workspaces of cuBLAS, reorders of oneDNN.

Where a figure comes from stands beside it. What is not known is not counted: cuDNN's workspaces on
a GPU, which depend on the algorithm it chooses, and oneDNN's scratchpads, which are small beside
the tensors that it reorders.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor

from trainer.config import RunConfig
from trainer.memory_estimate.allocation_tracker import Part, Scratch, Tracker, in_backward
from trainer.training.backend_flags import WORKSPACES

MATRIX_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm", "linear"))
HOPPER = (9, 0)


def scratch_of(config: RunConfig, capability: tuple[int, int] | None) -> Scratch | None:
    """Return what counts the memory beside the results, on a GPU of this capability or a CPU."""
    if capability is None:
        return host_scratch
    return CudaWorkspaces(cublas_workspace(config, capability))


def cublas_workspace(config: RunConfig, capability: tuple[int, int]) -> int:
    """Return the bytes that torch gives cuBLAS for each handle and stream.

    Torch's aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB on Hopper and
    Blackwell, else 8 MiB + 128 KiB, unless CUBLAS_WORKSPACE_CONFIG says ":KiB:count…".
    """
    chosen = os.environ.get(WORKSPACES) or (":4096:8" if config.deterministic else "")
    pairs = re.findall(r":(\d{1,9}):(\d{1,9})", chosen)
    if pairs:
        return sum(int(size) * 1024 * int(count) for size, count in pairs)
    return 4096 * 8 * 1024 if capability >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8


class CudaWorkspaces:
    """The workspaces of cuBLAS, each taken at the first matrix product of its handle and kept.

    Torch gives each thread a handle, and autograd has a thread of its own, so the backward pass has
    a second one: seen on an H100 (docs/gpu).
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: set[tuple[str, bool]] = set()

    @staticmethod
    def _is_product(func: Any) -> bool:
        return func._schema.name.removeprefix("aten::") in MATRIX_PRODUCTS

    def __call__(
        self,
        tracker: Tracker,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Any,
    ) -> None:
        """Count it before the first of its products."""
        handle = (tracker.pool, in_backward())
        if self._is_product(func) and handle not in self._taken:
            self._taken.add(handle)
            tracker.take(self._size, Part.WORKSPACE)


NARROW = 3
"""Channels up to which oneDNN takes the input as it lies."""


def host_scratch(
    tracker: Tracker,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: Any,
) -> None:
    """Count what oneDNN reorders on a CPU, and what some kernels make on the way.

    Measured with torch's profiler on torch 2.13 (AVX-512): a convolution copies its weights into
    blocks, and input and output too unless they lie channels last; the gradient of a batch norm's
    input is allocated twice.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "convolution":
        tracker.passing(forward_reorders(args[0], args[1], results))
    elif name == "convolution_backward":
        tracker.passing(backward_reorders(*args[:3]))
    elif name == "native_batch_norm_backward":
        tracker.passing(args[1].nbytes)
    elif name in LOSSES and results.dim() == 0:
        tracker.passing(2 * args[0].nbytes)


LOSSES = frozenset(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"))


def forward_reorders(inputs: Tensor, weights: Tensor, outputs: Tensor) -> int:
    """Return the bytes that the forward pass of a convolution takes beside its outputs."""
    if _channels_last(inputs):
        return weights.nbytes
    reordered = inputs.nbytes if inputs.shape[1] > NARROW else 0
    return max(reordered + weights.nbytes, outputs.nbytes)


def backward_reorders(gradients: Tensor, inputs: Tensor, weights: Tensor) -> int:
    """Return the bytes that its backward pass takes beside the two gradients that it gives."""
    if _channels_last(inputs):
        return 2 * weights.nbytes
    reordered = inputs.nbytes if inputs.shape[1] > NARROW else 0
    return max(reordered + gradients.nbytes, weights.nbytes)


def _channels_last(inputs: Tensor) -> bool:
    """Of one channel both formats are the same, and it counts as the common one."""
    return (
        inputs.dim() == 4
        and not inputs.is_contiguous()
        and inputs.is_contiguous(memory_format=torch.channels_last)
    )
