"""Bus bandwidth of a collective, as nccl-tests define it.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Size over time is the
algorithm bandwidth. It falls with the number of ranks, because each byte goes over several links.
A factor by collective makes the bus bandwidth of it, which can be held against what a link can do.
"""

from __future__ import annotations

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
BROADCAST = "broadcast"
ALL_TO_ALL = "all_to_all"

_NAMES = {
    "allreduce": ALL_REDUCE,
    "allreduce_coalesced": ALL_REDUCE,
    "_all_gather_base": ALL_GATHER,
    "allgather_into_tensor_coalesced": ALL_GATHER,
    "all_gather_into_tensor_coalesced": ALL_GATHER,
    "_reduce_scatter_base": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "all_to_all_base": ALL_TO_ALL,
    "alltoall_base": ALL_TO_ALL,
    "_broadcast_oop": BROADCAST,
    "_reduce_oop": "reduce",
}
"""torch's names of the same collectives in the Flight Recorder."""


def bus_factor(operation: str, ranks: int) -> float | None:
    """Return bus bandwidth over algorithm bandwidth; None for what has no definition.

    `operation` is torch's name of it. One rank moves nothing.

    >>> bus_factor("all_reduce", 4), bus_factor("_all_gather_base", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if ranks < 2:
        return None
    others = (ranks - 1) / ranks
    factors = {
        ALL_REDUCE: 2 * others,
        ALL_GATHER: others,
        REDUCE_SCATTER: others,
        ALL_TO_ALL: others,
        "gather": others,  # nccl-tests src/gather.cu and src/scatter.cu
        "scatter": others,
        BROADCAST: 1.0,
        "reduce": 1.0,
    }
    return factors.get(_NAMES.get(operation, operation))


def algorithm_bytes(operation: str, input_bytes: int, output_bytes: int) -> int:
    """Return the size that nccl-tests give a collective: of the whole array, in bytes.

    That is what one rank has at the end of all_gather and gather, and at the begin of all others.
    """
    grows = _NAMES.get(operation, operation) in (ALL_GATHER, "gather")
    return output_bytes if grows else input_bytes
