"""One rank of the benchmark: `torchrun … -m trainer.collectives.rank BACKEND BYTES,…`.

Rank 0 prints JSON lines: the machine, each result, the end. Times are measured as nccl-tests does:
consecutive calls, one synchronization at the end, the maximum over the ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.distributed.collective_metrics import bus_factor, link_of
from stepscope.gpu.source import is_simulated, nvml_uuid, open_source
from stepscope.host.environment import cpu_name
from trainer.collectives.measurement import NCCL, OPERATIONS

WARM_UP = 3
SECONDS = 0.2  # For each operation and size.
ROUNDS = 5  # The result is the median of their times.
MAX_CALLS = 2_000
TIMEOUT_S = 120.0  # Of one collective, after which a missing rank blocks the others no longer.
ELEMENT_BYTES = 4  # float32, the default of nccl-tests
_NAMES = {  # in torch from 2.13 on, and before
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_to_all": ("all_to_all_single",),
}

Call = Callable[[], object]


def prepare(
    operation: str, size: int, ranks: int, device: torch.device
) -> tuple[Call, Tensor, Tensor]:
    """Return a call on about `size` bytes of the default group, its input of ones, its output."""
    part = max(1, size // (ELEMENT_BYTES * ranks))
    source = torch.ones(part if operation == "all_gather" else part * ranks, device=device)
    if operation == "all_reduce":
        return partial(dist.all_reduce, source), source, source
    if operation == "broadcast":
        return partial(dist.broadcast, source, 0), source, source
    out = torch.zeros(part if operation == "reduce_scatter" else part * ranks, device=device)
    found = next(name for name in _NAMES[operation] if hasattr(dist, name))
    return partial(getattr(dist, found), out, source), source, out


def seconds_of(call: Call, count: int, device: torch.device) -> float:
    """Return the seconds per call of `count` calls on the slowest rank."""
    # Calls of gloo have ended when they return.
    synchronize: Call = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    dist.barrier()
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took) / count


def measure(operation: str, size: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """Return one result: seconds of a call, algorithm and bus bandwidth in bytes/s."""
    call, source, out = prepare(operation, size, ranks, device)
    call()
    wanted = float(ranks if operation in ("all_reduce", "reduce_scatter") else 1)
    found = (float(out[0]), float(out[-1]))
    if found != (wanted, wanted):
        raise ValueError(f"the result is {found[0]:g} … {found[1]:g}, not {wanted:g}")
    once_s = max(1e-7, seconds_of(call, WARM_UP, device))
    count = int(min(MAX_CALLS, max(2, SECONDS / ROUNDS / once_s)))
    rounds = [seconds_of(call, count, device) for _ in range(ROUNDS)]
    took_s, whole = statistics.median(rounds), max(source.nbytes, out.nbytes)
    return {
        "operation": operation,
        "bytes": whole,
        "seconds": took_s,
        "fastest_s": min(rounds),
        "slowest_s": max(rounds),
        "calls": count * ROUNDS,
        "algorithm": whole / took_s,
        "bus": whole / took_s * (bus_factor(operation, ranks) or 0.0),
    }


def results(sizes: Sequence[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield all results; an operation without a measurement has a reason."""
    ranks = dist.get_world_size()
    free = psutil.virtual_memory().available / ranks
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    least = torch.tensor(free / 4, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    limit = float(least)
    for operation in OPERATIONS:
        refused: str | None = None
        for size in sorted(sizes):
            if refused is None and 2 * size > limit:
                refused = "its buffers would take more than a quarter of the free memory"
            if refused is None:
                try:
                    yield measure(operation, size, ranks, device)
                    continue
                except (RuntimeError, ValueError) as error:
                    # All ranks raise for an unsupported operation. The barrier raises, and ends
                    # the measurement, if a rank has ended.
                    dist.barrier()
                    refused = str(error).strip().splitlines()[0][:300]
            yield {"operation": operation, "bytes": size, "reason": refused}


def machine(device: torch.device) -> dict[str, Any]:
    """Return versions and device of this rank; `link` is the fastest link of its GPU or None."""
    found: dict[str, Any] = {"torch": torch.__version__, "cores": psutil.cpu_count()}
    if device.type != "cuda":
        return found | {"device": cpu_name() or "CPU"}
    properties = torch.cuda.get_device_properties(device)
    uuid = nvml_uuid(str(properties.uuid), properties.name)
    facts = open_source().facts(uuid)
    link = None if facts is None else link_of(facts)
    return found | {
        "device": properties.name,
        "simulated": is_simulated(uuid),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "link": None if link is None else asdict(link),
    }


def main(arguments: list[str]) -> None:
    backend, sizes = arguments[0], list(map(int, arguments[1].split(",")))
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if backend == NCCL else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        measured = ({"result": result} for result in results(sizes, device))
        for content in chain([{"machine": machine(device)}], measured, [{"end": True}]):
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(content) + "\n")
                sys.stdout.flush()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
