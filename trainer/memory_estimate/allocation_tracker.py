"""Records the allocations and releases of a step that is simulated on fake tensors.

The memory of a tensor is its storage, which views share and autograd can keep alive. Of an
operation's temporary memory only larger cases are recorded: workspaces of cuBLAS, reorders of
oneDNN. Not recorded: cuDNN's workspaces on a GPU, which depend on its choice of algorithm, and
oneDNN's scratchpads, which are small.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from stepscope.settings.autocast import in_backward
from trainer.config import RunConfig
from trainer.training.precision import WORKSPACES

MATRIX_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm", "linear"))
LOSSES = frozenset(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"))
HOPPER = (9, 0)
NARROW = 3  # Channels up to which oneDNN does not reorder the input.


class AllocationCategory(StrEnum):
    """Categories of memory."""

    PARAMETERS = "parameters"  # and buffers, such as the statistics of batch norm
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"  # of the forward pass
    INPUTS = "inputs"  # batches and data on the device
    TEMPORARY = "temporary"  # of the backward pass and the optimizer
    WORKSPACE = "workspace"  # of libraries and kernels


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """An allocation (`size` > 0) or its release (-`size`) in the pool "" or of a CUDA graph."""

    number: int
    size: int
    pool: str = ""


Workspaces = Callable[["AllocationTracker", Any, tuple[Any, ...], Any], None]
"""Adds the workspaces of an operation: (tracker, operation, args, results)."""


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the allocations on one device while active; enter it after the fake mode.

    `part` is the category of new allocations; None: activations or temporary.
    """

    def __init__(self, device: torch.device, workspaces: Workspaces | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[AllocationEvent] = []
        self.parts: dict[int, AllocationCategory] = {}
        self.part: AllocationCategory | None = None
        self.pool = ""
        self._device = device
        self._workspaces = workspaces
        self._known: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self.note(result)
        if self._workspaces is not None:  # after the results: a kernel has both
            self._workspaces(self, func, args, results)
        return results

    def note(self, tensor: Tensor, part: AllocationCategory | None = None) -> None:
        """Record a tensor's memory, once; `part` sets its category."""
        if tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            kind = AllocationCategory.TEMPORARY if in_backward() else AllocationCategory.ACTIVATIONS
            release = self.take(storage.nbytes(), part or self.part or kind)
            gone = functools.partial(self._forget, key, release)
            self._known[key] = len(self.parts) - 1, weakref.ref(storage, gone)
        elif part is not None:
            self.parts[self._known[key][0]] = part

    def take(self, size: int, part: AllocationCategory) -> Callable[[], None]:
        """Record an allocation; return the function that records its release."""
        number = len(self.parts)
        self.parts[number] = part
        pool = self.pool
        self.events.append(AllocationEvent(number, size, pool))
        return lambda: self.events.append(AllocationEvent(number, -size, pool))

    def _forget(self, key: int, release: Callable[[], None], _: object) -> None:
        del self._known[key]
        release()


def workspaces_of(config: RunConfig, capability: tuple[int, int] | None) -> Workspaces:
    """Return the function that records workspaces on a GPU of this capability, or a CPU."""
    if capability is None:
        return host_workspaces
    size, taken = cublas_workspace(config, capability), set[tuple[str, bool]]()

    def record(tracker: AllocationTracker, func: Any, args: tuple[Any, ...], results: Any) -> None:
        # At the first matrix product of a handle, one per thread; autograd has a thread. Measured
        # on an H100 (docs/gpu).
        handle = (tracker.pool, in_backward())
        if func._schema.name.removeprefix("aten::") in MATRIX_PRODUCTS and handle not in taken:
            taken.add(handle)
            tracker.take(size, AllocationCategory.WORKSPACE)

    return record


def cublas_workspace(config: RunConfig, capability: tuple[int, int]) -> int:
    """Return the bytes that torch gives cuBLAS for each handle and stream.

    Torch's aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB on Hopper and
    Blackwell, else 8 MiB + 128 KiB, unless CUBLAS_WORKSPACE_CONFIG has ":KiB:count…".
    """
    chosen = os.environ.get(WORKSPACES) or (":4096:8" if config.deterministic else "")
    pairs = re.findall(r":(\d{1,9}):(\d{1,9})", chosen)
    if pairs:
        return sum(int(size) * 1024 * int(count) for size, count in pairs)
    return 4096 * 8 * 1024 if capability >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8


def host_workspaces(
    tracker: AllocationTracker, func: Any, args: tuple[Any, ...], results: Any
) -> None:
    """Record the reorders of oneDNN and temporary tensors of kernels on a CPU.

    Measured with torch's profiler on torch 2.13 (AVX-512): a convolution copies its weights into
    blocks, and input and output too unless they are channels_last; the gradient of a batch norm's
    input is allocated twice.
    """
    name, size = func._schema.name.removeprefix("aten::"), 0
    if name == "convolution":
        size = forward_reorders(args[0], args[1], results)
    elif name == "convolution_backward":
        size = backward_reorders(*args[:3])
    elif name == "native_batch_norm_backward":
        size = args[1].nbytes
    elif name in LOSSES and results.dim() == 0:
        size = 2 * args[0].nbytes
    if size:
        tracker.take(size, AllocationCategory.WORKSPACE)()


def forward_reorders(inputs: Tensor, weights: Tensor, outputs: Tensor) -> int:
    """Return the temporary bytes of a convolution's forward pass."""
    if _channels_last(inputs):
        return weights.nbytes
    reordered = inputs.nbytes if inputs.shape[1] > NARROW else 0
    return max(reordered + weights.nbytes, outputs.nbytes)


def backward_reorders(gradients: Tensor, inputs: Tensor, weights: Tensor) -> int:
    """Return the temporary bytes of a convolution's backward pass."""
    if _channels_last(inputs):
        return 2 * weights.nbytes
    reordered = inputs.nbytes if inputs.shape[1] > NARROW else 0
    return max(reordered + gradients.nbytes, weights.nbytes)


def _channels_last(inputs: Tensor) -> bool:
    """Return True for channels_last only; a tensor of one channel is both."""
    return (
        inputs.dim() == 4
        and not inputs.is_contiguous()
        and inputs.is_contiguous(memory_format=torch.channels_last)
    )
