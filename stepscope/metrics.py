"""Every metric Stepscope records: its key, stream, unit, source and meaning.

`docs/metrics.md` is written from this table; a test compares them. Keys have no unit: values are
stored in the unit given here (SI and bytes), and only the page formats them.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from enum import StrEnum


class Stream(StrEnum):
    """The series streams of a run's store (`docs/storage.md`)."""

    STEPS = "steps"
    SAMPLES = "samples"
    DEVICES = "devices"


class Unit(StrEnum):
    """Units as stored."""

    NONE = ""
    BYTES = "B"
    PERCENT = "%"
    WATT = "W"
    JOULE = "J"
    CELSIUS = "°C"
    MEGAHERTZ = "MHz"
    SECOND = "s"
    PER_SECOND = "1/s"
    TERAFLOPS = "TFLOP/s"
    COUNT = "count"
    MASK = "bit mask"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `key` is `group/name`, `source` the call that gives the value."""

    stream: Stream
    key: str
    unit: Unit
    label: str
    source: str
    meaning: str


_step = functools.partial(Metric, Stream.STEPS)
_sample = functools.partial(Metric, Stream.SAMPLES)
_device = functools.partial(Metric, Stream.DEVICES)
_ALLOC = "torch.cuda.memory_stats_as_nested_dict"

METRICS: tuple[Metric, ...] = (
    _step(
        "train/loss",
        Unit.NONE,
        "train loss",
        "training loop",
        "Loss of this optimizer step's batch, averaged over its samples. In a watched script: "
        "sum of the scalars on which backward() was called since the last step or zero_grad(), "
        "if they changed gradients of the optimizer.",
    ),
    _step(
        "train/backwards",
        Unit.COUNT,
        "backward calls",
        "torch.autograd.backward",
        "Calls of backward() whose sum is the loss of this step; recorded if more than one.",
    ),
    _step(
        "train/lr",
        Unit.NONE,
        "learning rate",
        "optimizer.param_groups[0]['lr']",
        "Learning rate that this step used.",
    ),
    _step(
        "train/grad_norm",
        Unit.NONE,
        "gradient norm",
        "clip_grad_norm_",
        "Total norm of the gradients before clipping (the 2-norm unless the script asks for "
        "another), over all calls before the step; recorded only with clipping.",
    ),
    _step(
        "train/amp_scale",
        Unit.NONE,
        "AMP scale",
        "GradScaler",
        "Loss scale of fp16 AMP; halves on inf gradients. The built-in loop reads it at the end "
        "of each epoch; in a watched script it is the scale that this step used.",
    ),
    _step(
        "train/amp_skipped",
        Unit.COUNT,
        "skipped steps",
        "GradScaler.step",
        "Optimizer steps skipped so far because a gradient was inf or NaN. A fused optimizer "
        "skips on the device; that is not counted, only the scale shows it.",
    ),
    _step(
        "train/epoch",
        Unit.COUNT,
        "epoch",
        "training loop",
        "Epoch that the step belongs to, counted from 1. In a watched script: passes over the "
        "DataLoader of the training; missing where it is not clear what an epoch is.",
    ),
    _step(
        "val/loss",
        Unit.NONE,
        "validation loss",
        "training loop",
        "Mean loss over the validation split, once an epoch.",
    ),
    _step(
        "val/accuracy",
        Unit.PERCENT,
        "validation accuracy",
        "training loop",
        "Share of validation samples classified correctly, once an epoch.",
    ),
    _step(
        "model/weight",
        Unit.NONE,
        "weight",
        "linear workload",
        "Slope of the fitted line (linear regression only).",
    ),
    _step(
        "model/bias",
        Unit.NONE,
        "bias",
        "linear workload",
        "Intercept of the fitted line (linear regression only).",
    ),
    _step(
        "perf/step_time",
        Unit.SECOND,
        "step time",
        "host clock",
        "Wall time from one step boundary to the next; pauses and validation are left out.",
    ),
    _step(
        "perf/samples_per_sec",
        Unit.PER_SECOND,
        "samples/s",
        "host clock",
        "Samples of this step divided by its step time.",
    ),
    _step(
        "perf/tokens_per_sec",
        Unit.PER_SECOND,
        "tokens/s",
        "gpt workload; the script: tokens=…",
        "Tokens of this step, which a script gives to stepscope.log or step, divided by its "
        "step time.",
    ),
    _step(
        "perf/data_wait",
        Unit.SECOND,
        "data wait",
        "host clock",
        "Part of the step time spent waiting for the next batch.",
    ),
    _step(
        "perf/h2d",
        Unit.SECOND,
        "copies to the GPU",
        "CUDA events around Tensor.to",
        "Time that the device spent on copies from the host by .to() and .cuda(). In a watched "
        "script a copy counts for the step in which its end was noticed, in the built-in loop for "
        "the step that used the batch.",
    ),
    _step(
        "perf/gpu_time",
        Unit.SECOND,
        "GPU time",
        "CUDA events around the step",
        "Time on the device from the begin of the forward pass to the end of the optimizer's "
        "update, copies of the batch left out. Where the host launches too slowly it contains the "
        "gaps between kernels: perf/gpu_wait tells. Built-in loop only: where the forward pass of "
        "a watched script begins is not known.",
    ),
    _step(
        "perf/gpu_wait",
        Unit.SECOND,
        "wait for the GPU",
        "host clock",
        "Part of the step time in which the host, two steps ahead, waited for the GPU. Near 0 the "
        "GPU waits for the host: for its launches, or for data. Built-in loop only.",
    ),
    _step(
        "perf/tflops",
        Unit.TERAFLOPS,
        "model FLOPs",
        "torch.utils.flop_counter.FlopCounterMode",
        "Floating-point operations of the model in this step, forward and backward, divided by its "
        "step time. Counted once, at the run's start; what activation checkpointing computes again "
        "does not count. Built-in loop only.",
    ),
    _step(
        "perf/mfu",
        Unit.PERCENT,
        "model FLOPs utilization",
        "perf/tflops and the GPU's data sheet",
        "Share of the GPU's dense peak for the run's precision that perf/tflops is (MFU). Missing "
        "on a CPU and where no peak is known; peak_reason in run.json says why.",
    ),
    _sample(
        "memory/allocated",
        Unit.BYTES,
        "allocated",
        f"{_ALLOC}: allocated_bytes.all.current",
        "Bytes of live tensors in torch's CUDA caching allocator, this process, this device. "
        "Read between two steps, and ten times a second inside steps of more than two ticks; "
        "where steps are short and one takes long, its first second is a gap.",
    ),
    _sample(
        "memory/reserved",
        Unit.BYTES,
        "reserved",
        f"{_ALLOC}: reserved_bytes.all.current",
        "Bytes that the caching allocator holds from the driver: allocated plus its cache.",
    ),
    _sample(
        "memory/peak_allocated",
        Unit.BYTES,
        "peak allocated",
        f"{_ALLOC}: allocated_bytes.all.peak",
        "Highest allocated since the run began or the last Reset peak stats.",
    ),
    _sample(
        "memory/peak_reserved",
        Unit.BYTES,
        "peak reserved",
        f"{_ALLOC}: reserved_bytes.all.peak",
        "Highest reserved since the run began or the last Reset peak stats.",
    ),
    _sample(
        "memory/active",
        Unit.BYTES,
        "active",
        f"{_ALLOC}: active_bytes.all.current",
        "Allocated, plus freed blocks that another stream may still use.",
    ),
    _sample(
        "memory/inactive_split",
        Unit.BYTES,
        "inactive split",
        f"{_ALLOC}: inactive_split_bytes.all.current",
        "Free parts of blocks in use: cache that empty_cache cannot return.",
    ),
    _sample(
        "memory/alloc_retries",
        Unit.COUNT,
        "allocation retries",
        f"{_ALLOC}: num_alloc_retries",
        "Allocations since the run began that failed first and succeeded after a cache flush.",
    ),
    _sample(
        "memory/ooms",
        Unit.COUNT,
        "out-of-memory errors",
        f"{_ALLOC}: num_ooms",
        "Out-of-memory errors that the allocator has raised since the run began.",
    ),
    _sample(
        "process/rss",
        Unit.BYTES,
        "process memory",
        "psutil.Process.memory_info().rss",
        "Resident memory of the training process.",
    ),
    _sample(
        "process/peak_rss",
        Unit.BYTES,
        "peak process memory",
        "sampler",
        "Highest process memory sampled since the run began or the last Reset peak stats.",
    ),
    _sample(
        "process/cpu",
        Unit.PERCENT,
        "process CPU",
        "time.process_time()",
        "CPU time of the training process per wall time, worker processes left out; "
        "100 % is one core.",
    ),
    _sample(
        "host/cpu",
        Unit.PERCENT,
        "host CPU",
        "psutil.cpu_percent()",
        "Busy share of all cores of the host.",
    ),
    _sample(
        "host/mem_used",
        Unit.BYTES,
        "host memory used",
        "psutil.virtual_memory()",
        "Host memory in use: total minus available.",
    ),
    _sample(
        "host/mem_total",
        Unit.BYTES,
        "host memory total",
        "psutil.virtual_memory()",
        "Host memory installed.",
    ),
    _sample(
        "sampler/cost",
        Unit.SECOND,
        "sampler cost",
        "host clock",
        "Wall time that the previous tick of the sampler took.",
    ),
    _device(
        "gpu/util",
        Unit.PERCENT,
        "GPU utilization",
        "nvmlDeviceGetUtilizationRates.gpu",
        "Share of the driver's sample window in which at least one kernel ran; "
        "the driver refreshes it about 6 times a second. Not SM occupancy.",
    ),
    _device(
        "gpu/mem_util",
        Unit.PERCENT,
        "memory controller",
        "nvmlDeviceGetUtilizationRates.memory",
        "Share of the sample window in which device memory was read or written.",
    ),
    _device(
        "gpu/mem_used",
        Unit.BYTES,
        "device used",
        "nvmlDeviceGetMemoryInfo_v2.used",
        "Device memory in use by all processes; older drivers add their own reserve.",
    ),
    _device(
        "gpu/mem_total",
        Unit.BYTES,
        "device total",
        "nvmlDeviceGetMemoryInfo.total",
        "Device memory installed.",
    ),
    _device(
        "gpu/temp",
        Unit.CELSIUS,
        "temperature",
        "nvmlDeviceGetTemperatureV",
        "GPU core temperature.",
    ),
    _device(
        "gpu/power",
        Unit.WATT,
        "power",
        "NVML_FI_DEV_POWER_INSTANT, else nvmlDeviceGetPowerUsage",
        "Board power now; a one-second average where only the older call works.",
    ),
    _device(
        "gpu/power_limit",
        Unit.WATT,
        "power limit",
        "nvmlDeviceGetEnforcedPowerLimit",
        "Power limit in force.",
    ),
    _device(
        "gpu/energy",
        Unit.JOULE,
        "energy counter",
        "nvmlDeviceGetTotalEnergyConsumption",
        "Energy since the driver was loaded; only differences are meaningful.",
    ),
    _device(
        "gpu/sm_clock",
        Unit.MEGAHERTZ,
        "SM clock",
        "nvmlDeviceGetClockInfo(SM)",
        "Clock of the streaming multiprocessors.",
    ),
    _device(
        "gpu/mem_clock",
        Unit.MEGAHERTZ,
        "memory clock",
        "nvmlDeviceGetClockInfo(MEM)",
        "Clock of the device memory.",
    ),
    _device(
        "gpu/throttle_reasons",
        Unit.MASK,
        "throttle reasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "Why clocks are below their maximum now, as a bit mask of NVML.",
    ),
)

BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}

_ALARMING = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of nvmlClocksEventReasons (nvml.h)."""


def throttle_words(mask: int) -> list[str]:
    """Name the alarming bits of `gpu/throttle_reasons`.

    An idle GPU, a power cap at full load and clocks that somebody has set are normal.
    """
    return [word for bit, word in _ALARMING.items() if mask & bit]


def metrics_markdown() -> str:
    """Return `docs/metrics.md`, written by `python -m stepscope.metrics > docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Written from `stepscope/metrics.py` by `python -m stepscope.metrics > docs/metrics.md`.",
        "A value that its source does not give is missing: a gap in the chart, never 0.",
        "Values that change slowly are read once or twice a second; rows between lack them.",
    ]
    for stream, heading in _HEADINGS.items():
        lines += ["", f"## {heading}", "", "| Metric | Unit | Source | Meaning |", "|-|-|-|-|"]
        lines += [_markdown_row(metric) for metric in METRICS if metric.stream is stream]
        lines += ["", *_DERIVED] if stream is Stream.STEPS else []
    return "\n".join(lines) + "\n"


_DERIVED = (
    "A script may have several optimizers, with several parameter groups. The first optimizer has",
    "the keys above; the one that stepped second has `train/loss.optimizer1`,",
    "`train/lr.optimizer1`, `train/grad_norm.optimizer1` and `train/backwards.optimizer1`, and so",
    "on; `optimizers` in `run.json` names them in this order. The learning rate of a second group",
    "is `train/lr.group1` (of optimizer 1: `train/lr.optimizer1.group1`). Units and meanings are",
    "those of the keys above. At most 8 optimizers and 8 groups of each are recorded.",
    "",
    "Other keys of this stream were logged by the script; `custom` in `run.json` lists them.",
)

_HEADINGS = {
    Stream.STEPS: "`steps`: one row per optimizer step",
    Stream.SAMPLES: "`samples`: one row per tick of the sampler (10 Hz)",
    Stream.DEVICES: "`devices`: one row per GPU and tick",
}


def _markdown_row(metric: Metric) -> str:
    unit = metric.unit or "–"
    return f"| `{metric.key}` | {unit} | {metric.source} | {metric.meaning} |"


if __name__ == "__main__":
    sys.stdout.write(metrics_markdown())
