"""Records the allocations of a step on fake tensors, and replays them in torch's CUDA allocator.

The memory of a tensor is its storage, which views share and autograd can keep alive. Of an
operation's temporary memory, workspaces of cuBLAS and reorders of oneDNN are recorded, not cuDNN's
workspaces, which depend on its choice of algorithm.

The allocator's rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) without
`expandable_segments`: sizes are rounded up to 512 B; up to 1 MiB comes from segments of 2 MiB, up
to 10 MiB from segments of 20 MiB, more from segments of its own size rounded up to 2 MiB. The
smallest free block of at least the size is used before a new segment, and split if the rest is
large enough. Segments stay reserved.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
MIN_BLOCK = 512
SMALL_SIZE = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_LARGE_ALLOCATION = 10 * 2**20
ROUND_LARGE = 2 * 2**20
EMPTY_CACHE = -1  # Number of the event at which the allocator releases free segments.
WAITING = "waiting"
"""Pool of memory that is freed and still reserved, such as a copied batch."""


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
    if _channels_last(inputs):
        return weights.nbytes
    reordered = inputs.nbytes if inputs.shape[1] > NARROW else 0
    return max(reordered + weights.nbytes, outputs.nbytes)


def backward_reorders(gradients: Tensor, inputs: Tensor, weights: Tensor) -> int:
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


def rounded(size: int) -> int:
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True, eq=False)
class AllocatorBlock:
    """A part of a segment; `before` and `after` are its neighbors in it."""

    size: int
    address: int
    pool: tuple[str, bool]
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Serves allocations; `allocated` and `reserved` are current bytes."""

    allocated: int = 0
    reserved: int = 0
    _free: dict[tuple[str, bool], set[AllocatorBlock]] = field(default_factory=dict)
    _address: int = 0

    def allocate(self, size: int, pool: str = "") -> AllocatorBlock:
        """Return a block, which may be larger than the allocation."""
        wanted = rounded(size)
        small = wanted <= SMALL_SIZE
        free = self._free.setdefault((pool, small), set())
        fitting = [block for block in free if block.size >= wanted]
        if fitting:
            block = min(fitting, key=lambda block: (block.size, block.address))
            free.remove(block)
        else:
            block = AllocatorBlock(segment_size(wanted), self._address, (pool, small))
            self.reserved += block.size
            self._address += block.size
        left = block.size - wanted
        if left >= MIN_BLOCK if small else left > SMALL_SIZE:
            rest = AllocatorBlock(left, block.address + wanted, block.pool, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, wanted
            free.add(rest)
        self.allocated += block.size
        return block

    def release(self, block: AllocatorBlock) -> None:
        """Free a block and merge it with its free neighbors."""
        self.allocated -= block.size
        free = self._free[block.pool]
        if block.before in free:
            before = block.before
            free.remove(before)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if block.after in free:
            after = block.after
            free.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        free.add(block)

    def empty_cache(self) -> None:
        """Release the segments that are completely free."""
        for free in self._free.values():
            for block in [one for one in free if one.before is one.after is None]:
                free.remove(block)
                self.reserved -= block.size


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes at the peak of allocated memory; `reserved` has its own peak, None on a CPU."""

    allocated: int
    parts: dict[str, int] = field(default_factory=dict)
    reserved: int | None = None


def peak_memory(
    events: Iterable[AllocationEvent], parts: Mapping[int, AllocationCategory], *, on_gpu: bool
) -> PeakMemory:
    """Return the peak of a list of allocations; on a GPU in its allocator, rounding as a part."""
    allocator, blocks = CachingAllocator(), dict[int, AllocatorBlock]()
    now: Counter[str] = Counter()
    total = most = reserved = 0
    at_most: Mapping[str, int] = {}
    for event in events:
        taken = event.size
        if event.number == EMPTY_CACHE:
            allocator.empty_cache()
            continue
        if on_gpu and event.size:
            before = allocator.allocated
            if event.size > 0:
                blocks[event.number] = allocator.allocate(event.size, event.pool)
            else:
                allocator.release(blocks.pop(event.number))
            taken = allocator.allocated - before
            reserved = max(reserved, allocator.reserved)
        if event.pool != WAITING:
            now[parts[event.number]] += event.size
            total += taken
            if total > most:
                most, at_most = total, now.copy()
    found = {part.value: at_most.get(part, 0) for part in AllocationCategory}
    if not on_gpu:
        return PeakMemory(most, found)
    return PeakMemory(most, {**found, "rounding": most - sum(found.values())}, reserved)
