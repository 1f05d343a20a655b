"""One rank of the measurement: `torchrun … -m trainer.collectives.rank PLAN`.

Rank 0 prints a JSON line for the machine, one for each result and one at the end. Times are taken
as nccl-tests do: calls one after the other, the device waited for at the end, the slowest rank
counts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.distributed.collective_metrics import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    bus_factor,
)
from stepscope.distributed.communication import link_of
from stepscope.gpu.source import nvml_uuid, open_source
from stepscope.host.environment import cpu_name
from trainer.collectives.plan import NCCL, Plan

WARM_UP = 3
ROUNDS = 5
"""Parts into which the time of a size is divided; the result is their median."""
MOST_CALLS = 2_000
TIMEOUT_S = 120.0
"""Longest time for one collective: a rank that is gone must not hold the others for long."""
ELEMENT = 4  # bytes: float32, as nccl-tests take by default

Call = Callable[[], object]


class WrongResultError(Exception):
    """A collective that gave another result than it must."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What one operation of one size reads and writes; both lie on this rank's device."""

    given: Tensor
    taken: Tensor
    size: int
    """Bytes of the whole array: a size that the ranks can share equally."""

    @classmethod
    def of(cls, operation: str, size: int, ranks: int, device: torch.device) -> Buffers:
        """Make the buffers of about `size` bytes; the input is filled with ones."""
        count = max(1, size // (ELEMENT * ranks)) * ranks
        part = count // ranks
        given = part if operation == ALL_GATHER else count
        taken = part if operation == REDUCE_SCATTER else count
        ones = torch.ones(given, device=device)
        in_place = operation in (ALL_REDUCE, BROADCAST)
        out = ones if in_place else torch.zeros(taken, device=device)
        return cls(ones, out, count * ELEMENT)


def call_of(operation: str, buffers: Buffers) -> Call:
    """Return one call of the operation, for all ranks of the default group."""
    given, taken = buffers.given, buffers.taken
    calls: dict[str, Call] = {
        ALL_REDUCE: lambda: dist.all_reduce(given),
        ALL_GATHER: lambda: _named("all_gather")(taken, given),
        REDUCE_SCATTER: lambda: _named("reduce_scatter")(taken, given),
        BROADCAST: lambda: dist.broadcast(given, src=0),
        ALL_TO_ALL: lambda: dist.all_to_all_single(taken, given),
    }
    return calls[operation]


def _named(operation: str) -> Callable[[Tensor, Tensor], object]:
    """Return the call on single tensors: torch 2.13 has given it another name."""
    olds = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    new: Callable[[Tensor, Tensor], object] | None = getattr(dist, f"{operation}_single", None)
    return new or getattr(dist, olds[operation])


def check(operation: str, buffers: Buffers, ranks: int) -> None:
    """Raise WrongResultError where one call on ones gave another result. Waits for the device."""
    wanted = float(ranks if operation in (ALL_REDUCE, REDUCE_SCATTER) else 1)
    found = (float(buffers.taken[0]), float(buffers.taken[-1]))
    if found != (wanted, wanted):
        raise WrongResultError(f"the result is {found[0]:g} … {found[1]:g}, not {wanted:g}")


class Clock:
    """Times calls over all ranks: the slowest one counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, call: Call, count: int) -> float:
        """Return the seconds of one of `count` calls, the same number on all ranks."""
        self.wait()
        dist.barrier()
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        took = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=self._device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took) / count

    def wait(self) -> None:
        """Wait for the device; gloo's calls have ended when they return."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(operation: str, size: int, plan: Plan, clock: Clock, device: torch.device) -> Any:
    """Return one result: seconds of a call, algorithm and bus bandwidth in bytes/s."""
    buffers = Buffers.of(operation, size, plan.ranks, device)
    call = call_of(operation, buffers)
    call()
    check(operation, buffers, plan.ranks)
    once_s = max(1e-7, clock.seconds(call, WARM_UP))
    count = int(min(MOST_CALLS, max(2, plan.seconds / ROUNDS / once_s)))
    rounds = [clock.seconds(call, count) for _ in range(ROUNDS)]
    took_s = statistics.median(rounds)
    algorithm = buffers.size / took_s
    return {
        "operation": operation,
        "bytes": buffers.size,
        "seconds": took_s,
        "fastest_s": min(rounds),
        "slowest_s": max(rounds),
        "calls": count * ROUNDS,
        "algorithm": algorithm,
        "bus": algorithm * (bus_factor(operation, plan.ranks) or 0.0),
    }


def results(plan: Plan, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure everything; what cannot be measured is a result with a reason."""
    clock, room = Clock(device), _room(plan, device)
    for operation in plan.operations:
        refused: str | None = None
        for size in sorted(plan.sizes):
            if refused is None and 2 * size > room:
                refused = "its buffers would take more than a quarter of the free memory"
            if refused is None:
                try:
                    yield measure(operation, size, plan, clock, device)
                    continue
                except (RuntimeError, ValueError, WrongResultError) as error:
                    # A backend without it says so on all ranks, before anything is sent; after
                    # the end of a rank this raises, and ends the measurement.
                    dist.barrier()
                    refused = str(error).strip().splitlines()[0][:300]
            yield {"operation": operation, "bytes": size, "reason": refused}


def _room(plan: Plan, device: torch.device) -> float:
    """Return the bytes that the buffers of each rank may take: the least of all ranks."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] / 4
    else:
        free = psutil.virtual_memory().available / plan.ranks / 4
    least = torch.tensor(free, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the ranks run on, as rank 0 sees it; `link` is the fastest of its GPU."""
    found: dict[str, Any] = {"torch": torch.__version__, "cores": psutil.cpu_count()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid = nvml_uuid(str(properties.uuid), properties.name)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return found | {"device": properties.name, "nccl": nccl, "link": _link(uuid)}
    return found | {"device": cpu_name() or "CPU"}


def _link(uuid: str) -> dict[str, Any] | None:
    """Return what the GPU's link can do; None where the driver does not tell."""
    facts = open_source().facts(uuid)
    link = None if facts is None else link_of(asdict(facts))
    return None if link is None else asdict(link)


def main(arguments: list[str]) -> None:
    """Measure as one rank of torchrun's job."""
    plan = Plan.from_json(arguments[0])
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if plan.backend == NCCL else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(plan.backend, timeout=timedelta(seconds=TIMEOUT_S))
    first = dist.get_rank() == 0
    try:
        if first:
            _tell({"machine": machine(device)})
        for result in results(plan, device):
            if first:
                _tell({"result": result})
        if first:
            _tell({"end": True})
    finally:
        dist.destroy_process_group()


def _tell(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
