"""Metrics of the process and its host, one row per tick of the sampler."""

from __future__ import annotations

from stepscope.metrics.metric import MetricTable, Unit

SAMPLES: MetricTable = {
    "memory/allocated": (
        Unit.BYTES,
        "allocated",
        "Bytes of live tensors in torch's CUDA caching allocator, this process, this device. "
        "Read between two steps, and ten times a second inside steps of more than two ticks; "
        "where steps are short and one takes long, its first second is a gap.",
    ),
    "memory/reserved": (
        Unit.BYTES,
        "reserved",
        "Bytes that the caching allocator holds from the driver: allocated plus its cache.",
    ),
    "memory/peak_allocated": (
        Unit.BYTES,
        "peak allocated",
        "Highest allocated since the run began or the last Reset peak stats.",
    ),
    "memory/peak_reserved": (
        Unit.BYTES,
        "peak reserved",
        "Highest reserved since the run began or the last Reset peak stats.",
    ),
    "memory/active": (
        Unit.BYTES,
        "active",
        "Allocated, plus freed blocks that another stream may still use.",
    ),
    "memory/inactive_split": (
        Unit.BYTES,
        "inactive split",
        "Free parts of blocks in use: cache that empty_cache cannot return.",
    ),
    "memory/alloc_retries": (
        Unit.COUNT,
        "allocation retries",
        "Allocations since the run began that failed first and succeeded after a cache flush.",
    ),
    "memory/ooms": (
        Unit.COUNT,
        "out-of-memory errors",
        "Out-of-memory errors that the allocator has raised since the run began.",
    ),
    "process/rss": (Unit.BYTES, "process memory", "Resident memory of the training process."),
    "process/peak_rss": (
        Unit.BYTES,
        "peak process memory",
        "Highest process memory sampled since the run began or the last Reset peak stats.",
    ),
    "process/cpu": (
        Unit.PERCENT,
        "process CPU",
        "CPU time of the training process per wall time, without workers; 100% is one core.",
    ),
    "host/cpu": (Unit.PERCENT, "host CPU", "Busy share of all cores of the host."),
    "host/mem_used": (
        Unit.BYTES,
        "host memory used",
        "Host memory in use: total minus available. In a container with a limit: what it uses, "
        "without files that were not read lately.",
    ),
    "host/mem_total": (
        Unit.BYTES,
        "host memory total",
        "Host memory installed, or the limit of the container where that is less.",
    ),
    "sampler/cost": (
        Unit.SECOND,
        "sampler cost",
        "Wall time that the previous tick of the sampler took.",
    ),
    "memory/parameters": (
        Unit.BYTES,
        "parameters",
        "Bytes of the weights that the optimizers update and of frozen ones, each storage once, on "
        "the device that trains; on a CPU part of the process memory. Read about once a second "
        "between two steps, with memory/allocated or process/rss of the same row.",
    ),
    "memory/gradients": (
        Unit.BYTES,
        "gradients",
        "Bytes of the gradients that are held between two steps: in a watched script as "
        "optimizer.step() ends, in the built-in loop after zero_grad(), which sets them to None.",
    ),
    "memory/optimizer_state": (
        Unit.BYTES,
        "optimizer state",
        "Bytes of the optimizers' tensors on the device that trains, such as Adam's moments.",
    ),
    "memory/process_used": (
        Unit.BYTES,
        "process on the device",
        "Device memory of this process as the driver counts it: reserved, and what CUDA's "
        "context and libraries take. Missing where the driver hides it.",
    ),
    "process/children_rss": (
        Unit.BYTES,
        "worker memory",
        "Resident memory of this process's children and of theirs, such as data-loading workers, "
        "once a second; pages shared with this process count again.",
    ),
    "comm/bytes": (
        Unit.BYTES,
        "collective bytes per step",
        "Bytes of the tensors that this rank passed to collectives per step: mean of the steps "
        "since the previous sample, 1 to 64 s ago. Only in jobs of several processes. Overwritten "
        "entries count with the mean size; run.json has their number.",
    ),
    "comm/rate": (
        Unit.BYTES_PER_SECOND,
        "collective throughput",
        "Bytes per second that this rank passed to collectives since the previous sample; the "
        "traffic on the link is up to twice as much.",
    ),
    "comm/time": (
        Unit.SECOND,
        "collective time per step",
        "Time that the device spent in collectives in a step, waiting for other ranks included: "
        "the mean of the steps since the previous sample. Concurrent collectives of several groups "
        "count each. Only with the switch that times collectives.",
    ),
    "comm/share": (
        Unit.PERCENT,
        "share of time in collectives",
        "Time in collectives as a share of the time since the previous sample; other kernels may "
        "run concurrently, so it need not be lost time.",
    ),
    "comm/bus_bandwidth": (
        Unit.BYTES_PER_SECOND,
        "bus bandwidth",
        "Bus bandwidth, as nccl-tests define it, of the timed collectives of at least 1 MiB.",
    ),
}
