"""The plan of a measurement: backend, ranks, operations and sizes. No torch import."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepscope.distributed.collective_metrics import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
)

GLOO, NCCL = "gloo", "nccl"
OPERATIONS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL)
KIB, MIB, GIB = 2**10, 2**20, 2**30
MAX_RANKS = 64
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:iB|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}


class PlanError(ValueError):
    """An invalid plan; the message has the field, its valid values, and the given one."""


def sizes_between(first: int, last: int) -> tuple[int, ...]:
    """Return the sizes from `first` up to `last` in steps of 4×.

    >>> [size // KIB for size in sizes_between(KIB, 64 * KIB)]
    [1, 4, 16, 64]
    """
    return tuple(size for power in range(32) if (size := first * 4**power) <= last)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePlan:
    """One measurement. Raises PlanError.

    `sizes` are bytes of the whole array, as in nccl-tests; `seconds` are per size and operation.
    """

    backend: str = GLOO
    ranks: int = 2
    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = sizes_between(KIB, 16 * MIB)
    seconds: float = 0.2

    def __post_init__(self) -> None:
        if self.backend not in (GLOO, NCCL):
            raise PlanError(f"backend: gloo for CPUs or nccl for GPUs, got {self.backend!r}.")
        if not 2 <= self.ranks <= MAX_RANKS:
            raise PlanError(f"ranks: 2 to {MAX_RANKS} processes, got {self.ranks}.")
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if unknown or not self.operations:
            known = ", ".join(OPERATIONS)
            raise PlanError(f"operations: some of {known}, got {', '.join(unknown) or 'none'}.")
        if not self.sizes or not all(KIB <= size <= 16 * GIB for size in self.sizes):
            raise PlanError(f"sizes: 1 KiB to 16 GiB each, got {list(self.sizes)} bytes.")
        if not 0.01 <= self.seconds <= 10:
            raise PlanError(f"seconds: 0.01 to 10 for each size, got {self.seconds}.")

    @property
    def count(self) -> int:
        """Number of results."""
        return len(self.operations) * len(self.sizes)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a text such as "1K..64M" or "1K,1M,16M". Raises PlanError.

    >>> parse_sizes("1K..16K"), parse_sizes("1K, 3MiB")
    ((1024, 4096, 16384), (1024, 3145728))
    """
    first, is_range, last = text.partition("..")
    if not is_range:
        return tuple(map(_size, text.split(",")))
    low, high = _size(first), _size(last)
    if low > high:
        raise PlanError(f"sizes: from the smaller to the larger, got {text[:80]!r}.")
    return sizes_between(low, high)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"sizes: such as 1K..64M or 1K,1M with K, M or G, got {text[:80]!r}.")
    return int(match[1]) * _UNITS[match[2].upper()]


def refusal(plan: CollectivePlan, gpus: int, no_gpu: str | None) -> str | None:
    """Return why this machine cannot measure the plan, or None.

    `no_gpu` is the reason why torch has no CUDA device.
    """
    if plan.backend != NCCL or gpus >= plan.ranks:
        return None
    if gpus == 0:
        return f"NCCL needs GPUs. {no_gpu or 'This machine has none.'} Choose gloo for the CPUs."
    return f"NCCL needs a GPU for each of the {plan.ranks} ranks; found {gpus}. Reduce the ranks."
