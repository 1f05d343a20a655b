"""Every metric Stepscope records: its key, stream, unit, source and meaning.

`docs/metrics.md` is written from this table; a test compares them. Keys have no unit: values are
stored in the unit given here (SI and bytes), and only the page formats them.
"""

from __future__ import annotations

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
    COUNT = "count"
    MASK = "bit mask"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `key` is `group/name`, `source` the call that gives the value."""

    key: str
    stream: Stream
    unit: Unit
    label: str
    source: str
    meaning: str


_S, _T, _D = Stream.STEPS, Stream.SAMPLES, Stream.DEVICES
_ALLOC = "torch.cuda.memory_stats_as_nested_dict"

METRICS: tuple[Metric, ...] = (
    Metric(
        "train/loss",
        _S,
        Unit.NONE,
        "train loss",
        "training loop",
        "Loss of this optimizer step's batch, averaged over its samples. In a watched script: "
        "sum of the scalars on which backward() was called since the last step or zero_grad(), "
        "if they changed gradients of the optimizer.",
    ),
    Metric(
        "train/backwards",
        _S,
        Unit.COUNT,
        "backward calls",
        "torch.autograd.backward",
        "Calls of backward() whose sum is the loss of this step; recorded if more than one.",
    ),
    Metric(
        "train/lr",
        _S,
        Unit.NONE,
        "learning rate",
        "optimizer.param_groups[0]['lr']",
        "Learning rate that this step used.",
    ),
    Metric(
        "train/grad_norm",
        _S,
        Unit.NONE,
        "gradient norm",
        "clip_grad_norm_",
        "Total norm of the gradients before clipping (the 2-norm unless the script asks for "
        "another), over all calls before the step; recorded only with clipping.",
    ),
    Metric(
        "train/amp_scale",
        _S,
        Unit.NONE,
        "AMP scale",
        "GradScaler",
        "Loss scale of fp16 AMP; halves on inf gradients. The built-in loop reads it at the end "
        "of each epoch; in a watched script it is the scale that this step used.",
    ),
    Metric(
        "train/amp_skipped",
        _S,
        Unit.COUNT,
        "skipped steps",
        "GradScaler.step",
        "Optimizer steps skipped so far because a gradient was inf or NaN. A fused optimizer "
        "skips on the device; that is not counted, only the scale shows it.",
    ),
    Metric(
        "train/epoch",
        _S,
        Unit.COUNT,
        "epoch",
        "training loop",
        "Epoch that the step belongs to, counted from 1. In a watched script: passes over the "
        "DataLoader of the training; missing where it is not clear what an epoch is.",
    ),
    Metric(
        "val/loss",
        _S,
        Unit.NONE,
        "validation loss",
        "training loop",
        "Mean loss over the validation split, once an epoch.",
    ),
    Metric(
        "val/accuracy",
        _S,
        Unit.PERCENT,
        "validation accuracy",
        "training loop",
        "Share of validation samples classified correctly, once an epoch.",
    ),
    Metric(
        "model/weight",
        _S,
        Unit.NONE,
        "weight",
        "linear workload",
        "Slope of the fitted line (linear regression only).",
    ),
    Metric(
        "model/bias",
        _S,
        Unit.NONE,
        "bias",
        "linear workload",
        "Intercept of the fitted line (linear regression only).",
    ),
    Metric(
        "perf/step_time",
        _S,
        Unit.SECOND,
        "step time",
        "host clock",
        "Wall time from one step boundary to the next; pauses and validation are left out.",
    ),
    Metric(
        "perf/samples_per_sec",
        _S,
        Unit.PER_SECOND,
        "samples/s",
        "host clock",
        "Samples of this step divided by its step time.",
    ),
    Metric(
        "perf/tokens_per_sec",
        _S,
        Unit.PER_SECOND,
        "tokens/s",
        "the script: tokens=…",
        "Tokens of this step, which the script gives to stepscope.log or step, divided by its "
        "step time.",
    ),
    Metric(
        "perf/data_wait",
        _S,
        Unit.SECOND,
        "data wait",
        "host clock",
        "Part of the step time spent waiting for the next batch.",
    ),
    Metric(
        "perf/h2d",
        _S,
        Unit.SECOND,
        "copies to the GPU",
        "CUDA events around Tensor.to",
        "Time that the device spent on copies from the host by .to() and .cuda(). A copy counts "
        "for the step in which its end was noticed.",
    ),
    Metric(
        "memory/allocated",
        _T,
        Unit.BYTES,
        "allocated",
        f"{_ALLOC}: allocated_bytes.all.current",
        "Bytes of live tensors in torch's CUDA caching allocator, this process, this device. "
        "Read between two steps, and ten times a second inside steps of more than two ticks; "
        "where steps are short and one takes long, its first second is a gap.",
    ),
    Metric(
        "memory/reserved",
        _T,
        Unit.BYTES,
        "reserved",
        f"{_ALLOC}: reserved_bytes.all.current",
        "Bytes that the caching allocator holds from the driver: allocated plus its cache.",
    ),
    Metric(
        "memory/peak_allocated",
        _T,
        Unit.BYTES,
        "peak allocated",
        f"{_ALLOC}: allocated_bytes.all.peak",
        "Highest allocated since the run began or the last Reset peak stats.",
    ),
    Metric(
        "memory/peak_reserved",
        _T,
        Unit.BYTES,
        "peak reserved",
        f"{_ALLOC}: reserved_bytes.all.peak",
        "Highest reserved since the run began or the last Reset peak stats.",
    ),
    Metric(
        "memory/active",
        _T,
        Unit.BYTES,
        "active",
        f"{_ALLOC}: active_bytes.all.current",
        "Allocated, plus freed blocks that another stream may still use.",
    ),
    Metric(
        "memory/inactive_split",
        _T,
        Unit.BYTES,
        "inactive split",
        f"{_ALLOC}: inactive_split_bytes.all.current",
        "Free parts of blocks in use: cache that empty_cache cannot return.",
    ),
    Metric(
        "memory/alloc_retries",
        _T,
        Unit.COUNT,
        "allocation retries",
        f"{_ALLOC}: num_alloc_retries",
        "Allocations since the run began that failed first and succeeded after a cache flush.",
    ),
    Metric(
        "memory/ooms",
        _T,
        Unit.COUNT,
        "out-of-memory errors",
        f"{_ALLOC}: num_ooms",
        "Out-of-memory errors that the allocator has raised since the run began.",
    ),
    Metric(
        "process/rss",
        _T,
        Unit.BYTES,
        "process memory",
        "psutil.Process.memory_info().rss",
        "Resident memory of the training process.",
    ),
    Metric(
        "process/peak_rss",
        _T,
        Unit.BYTES,
        "peak process memory",
        "sampler",
        "Highest process memory sampled since the run began or the last Reset peak stats.",
    ),
    Metric(
        "process/cpu",
        _T,
        Unit.PERCENT,
        "process CPU",
        "time.process_time()",
        "CPU time of the training process per wall time, worker processes left out; "
        "100 % is one core.",
    ),
    Metric(
        "host/cpu",
        _T,
        Unit.PERCENT,
        "host CPU",
        "psutil.cpu_percent()",
        "Busy share of all cores of the host.",
    ),
    Metric(
        "host/mem_used",
        _T,
        Unit.BYTES,
        "host memory used",
        "psutil.virtual_memory()",
        "Host memory in use: total minus available.",
    ),
    Metric(
        "host/mem_total",
        _T,
        Unit.BYTES,
        "host memory total",
        "psutil.virtual_memory()",
        "Host memory installed.",
    ),
    Metric(
        "sampler/cost",
        _T,
        Unit.SECOND,
        "sampler cost",
        "host clock",
        "Wall time that the previous tick of the sampler took.",
    ),
    Metric(
        "gpu/util",
        _D,
        Unit.PERCENT,
        "GPU utilization",
        "nvmlDeviceGetUtilizationRates.gpu",
        "Share of the driver's sample window in which at least one kernel ran; "
        "the driver refreshes it about 6 times a second. Not SM occupancy.",
    ),
    Metric(
        "gpu/mem_util",
        _D,
        Unit.PERCENT,
        "memory controller",
        "nvmlDeviceGetUtilizationRates.memory",
        "Share of the sample window in which device memory was read or written.",
    ),
    Metric(
        "gpu/mem_used",
        _D,
        Unit.BYTES,
        "device used",
        "nvmlDeviceGetMemoryInfo_v2.used",
        "Device memory in use by all processes; older drivers add their own reserve.",
    ),
    Metric(
        "gpu/mem_total",
        _D,
        Unit.BYTES,
        "device total",
        "nvmlDeviceGetMemoryInfo.total",
        "Device memory installed.",
    ),
    Metric(
        "gpu/temp",
        _D,
        Unit.CELSIUS,
        "temperature",
        "nvmlDeviceGetTemperatureV",
        "GPU core temperature.",
    ),
    Metric(
        "gpu/power",
        _D,
        Unit.WATT,
        "power",
        "NVML_FI_DEV_POWER_INSTANT, else nvmlDeviceGetPowerUsage",
        "Board power now; a one-second average where only the older call works.",
    ),
    Metric(
        "gpu/power_limit",
        _D,
        Unit.WATT,
        "power limit",
        "nvmlDeviceGetEnforcedPowerLimit",
        "Power limit in force.",
    ),
    Metric(
        "gpu/energy",
        _D,
        Unit.JOULE,
        "energy counter",
        "nvmlDeviceGetTotalEnergyConsumption",
        "Energy since the driver was loaded; only differences are meaningful.",
    ),
    Metric(
        "gpu/sm_clock",
        _D,
        Unit.MEGAHERTZ,
        "SM clock",
        "nvmlDeviceGetClockInfo(SM)",
        "Clock of the streaming multiprocessors.",
    ),
    Metric(
        "gpu/mem_clock",
        _D,
        Unit.MEGAHERTZ,
        "memory clock",
        "nvmlDeviceGetClockInfo(MEM)",
        "Clock of the device memory.",
    ),
    Metric(
        "gpu/throttle_reasons",
        _D,
        Unit.MASK,
        "throttle reasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "Why clocks are below their maximum now, as a bit mask of NVML.",
    ),
)

BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}


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
