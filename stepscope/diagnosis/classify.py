"""Classify the bottleneck of a run's steps. Pure; no I/O.

A step on a GPU has four parts: computing, idle while the host waits for data, copying a batch, and
idle between launches. A verdict explains the *visible wait*: the idle and copy time if it is more
than a fifth of a step, else the step itself. `share` is the fraction of it that the cause explains;
below EXPLAINED no cause is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepscope.diagnosis.recommendations import next_to_try
from stepscope.distributed.stragglers.reader import BUSY_HOST
from stepscope.run_setup import Recommendation, RunSetup

MIN_STEPS = 20  # Minimum number of steady steps, as in TraceML.
EXPLAINED = 0.8  # Minimum fraction of the visible wait for a single cause.
STANDS_STILL = 1 - EXPLAINED  # Minimum wait for data or copies in a step; critical in TraceML.
GAPS = 0.25  # Minimum fraction of a step in gaps between launches: small gaps are usual.
AHEAD = 0.02  # Minimum fraction of a step that a host ahead of its GPU waits for it.

IsSettingAllowed = Callable[[str, Any], bool]


class BottleneckKind(StrEnum):
    """Bottleneck of a step. The last three name no cause."""

    INPUT = "input-bound"
    TRANSFER = "transfer-bound"
    LAUNCH = "launch-bound"
    COMPUTE = "compute-bound"
    THROTTLED = "throttled"
    CONTENTION = "cpu-contention"
    STRAGGLER = "straggler"  # Found in the steps of all ranks, never by `verdict`.
    NOT_FINITE = "loss-not-finite"  # Found in the events of an ended run, never by `verdict`.
    SIMULATED = "simulated"
    UNCLEAR = "no single cause"
    TOO_YOUNG = "not enough data yet"

    @property
    def names_a_cause(self) -> bool:
        """False for a verdict that abstains."""
        abstains = (BottleneckKind.SIMULATED, BottleneckKind.UNCLEAR, BottleneckKind.TOO_YOUNG)
        return self not in abstains


PHASES = {
    BottleneckKind.INPUT: "data",
    BottleneckKind.TRANSFER: "copy",
    BottleneckKind.LAUNCH: "launch",
}
"""Phase of a step by kind; that of all others is "compute"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAverages:
    """Means over a window of steady steps; None if not recorded.

    Times are seconds per step. `utilization`, `throttled` and `host_cpu` are fractions: of time, of
    samples with an abnormal clocks event reason, and of all cores. `process_cpu` is in cores.
    Clocks are in MHz, and `sm_clock_max` is the run's maximum.
    """

    steps: int
    step_time: float = 0.0
    data_wait: float | None = None
    copies: float | None = None
    device_time: float | None = None
    gpu_wait: float | None = None
    utilization: float | None = None
    process_cpu: float | None = None
    host_cpu: float | None = None
    throttled: float | None = None
    throttle_words: tuple[str, ...] = ()
    sm_clock: float | None = None
    sm_clock_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """The parts of a step as fractions of its wall time; they sum to 1."""

    compute: float
    data: float
    copies: float
    other: float  # Gaps between launches on a GPU; any wait but that for data on a CPU.

    @property
    def idle(self) -> float:
        """The fraction in which the device does not compute."""
        return self.data + self.copies + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckDiagnosis:
    """Verdict on a run's steps as a sentence, with a recommendation if it has a cause."""

    kind: BottleneckKind
    text: str
    share: float | None = None  # None without a cause.
    next: Recommendation | None = None
    parts: StepBreakdown | None = None  # None if unknown.
    figures: StepAverages = field(default_factory=lambda: StepAverages(steps=0))

    @property
    def phase(self) -> str:
        """The phase of the verdict."""
        return PHASES.get(self.kind, "compute")


def verdict(
    figures: StepAverages, setup: RunSetup, allowed: IsSettingAllowed = lambda name, value: True
) -> BottleneckDiagnosis:
    """Classify a window of steps; `allowed(field, value)` filters the recommended settings."""
    missing = MIN_STEPS - figures.steps
    if missing > 0 or figures.step_time <= 0:
        missing = max(1, missing)
        steps = "1 more step is" if missing == 1 else f"{missing} more steps are"
        text = f"Not enough data yet: {steps} needed; the first, slow steps do not count."
        return BottleneckDiagnosis(kind=BottleneckKind.TOO_YOUNG, text=text, figures=figures)
    if setup.simulated:
        text = "No diagnosis: the GPU is simulated, and its times are not those of a GPU."
        return BottleneckDiagnosis(kind=BottleneckKind.SIMULATED, text=text, figures=figures)
    parts = parts_of(figures, setup)
    if isinstance(parts, str):
        return BottleneckDiagnosis(kind=BottleneckKind.UNCLEAR, text=parts, figures=figures)
    kind, share = _cause(parts, figures, setup)
    # NCCL's kernels occupy the GPU while they wait for other ranks.
    waits_too = kind is BottleneckKind.COMPUTE and setup.on_gpu and setup.world_size > 1
    if kind is BottleneckKind.UNCLEAR or share is None:
        text = _unclear(parts, setup)
        return BottleneckDiagnosis(kind=kind, text=text, parts=parts, figures=figures)
    return BottleneckDiagnosis(
        kind=kind,
        text=_text(kind, parts, figures, setup),
        share=share,
        next=None if waits_too else next_to_try(kind.value, setup, allowed),
        parts=parts,
        figures=figures,
    )


def parts_of(figures: StepAverages, setup: RunSetup) -> StepBreakdown | str:
    """Return the parts of a step, or a sentence with the reason why they are unknown.

    On a GPU, with T the step time:

    - Computing is the smaller of the time between the step's two events, which includes gaps, and
      utilization × T, which includes other processes. Without a utilization the events count only
      if the host waits for the GPU: then there are no gaps.
    - Of the rest, copies come first if they are on the stream that computes, else data.
    - Waiting for data counts as far as the device is idle meanwhile. A copy that blocks the host is
      part of the measured data wait, and is subtracted from it.
    - The remainder is gaps between launches.

    On a CPU, computing is the time without data wait, at most the CPU time of the process. The rest
    is waiting, for a core if all are in use. Without the CPU time it is undetermined.
    """
    if figures.data_wait is None and (setup.on_gpu or figures.process_cpu is None):
        return (
            "No diagnosis: data wait is unknown; it is measured for batches from a torch "
            "DataLoader or rec.batches()."
        )
    wait = min(1.0, (figures.data_wait or 0.0) / figures.step_time)
    if not setup.on_gpu:
        return _cpu_parts(figures, wait)
    busy = _busy(figures)
    if busy is None:
        return "No diagnosis: GPU utilization is missing to separate computing from idle time."
    idle = 1.0 - busy
    copied = min(1.0, (figures.copies or 0.0) / figures.step_time)
    if setup.copies_block:
        wait = max(0.0, wait - copied)
    if setup.is_on("copy_stream"):
        data = min(wait, idle)
        copies = min(copied, idle - data)
    else:
        copies = min(copied, idle)
        data = min(wait, idle - copies)
    return StepBreakdown(
        compute=busy, data=data, copies=copies, other=max(0.0, idle - data - copies)
    )


def _cpu_parts(figures: StepAverages, wait: float) -> StepBreakdown | str:
    if figures.process_cpu is None and wait <= STANDS_STILL:
        return "No diagnosis: whether the process computes is unknown before a second of steps."
    busy = 1.0 if figures.process_cpu is None else figures.process_cpu
    other = max(0.0, 1.0 - wait - busy)
    return StepBreakdown(compute=1.0 - wait - other, data=wait, copies=0.0, other=other)


def _busy(figures: StepAverages) -> float | None:
    """Return the fraction of a step in which the GPU computes; None if undetermined."""
    between = figures.device_time
    if figures.utilization is None:
        unsure = figures.gpu_wait is None or figures.gpu_wait < AHEAD * figures.step_time
        return None if between is None or unsure else min(1.0, between / figures.step_time)
    return min(1.0, figures.utilization, 1.0 if between is None else between / figures.step_time)


def _cause(
    parts: StepBreakdown, figures: StepAverages, setup: RunSetup
) -> tuple[BottleneckKind, float | None]:
    """Return the kind and the fraction of the visible wait that it explains."""
    idle = parts.idle
    if idle > STANDS_STILL:
        if parts.data >= EXPLAINED * idle:
            return BottleneckKind.INPUT, parts.data / idle
        if parts.copies >= EXPLAINED * idle:
            return BottleneckKind.TRANSFER, parts.copies / idle
    # Without measured copies, gaps may be copies.
    launches = setup.on_gpu and figures.copies is not None
    if launches and idle >= GAPS and parts.other >= EXPLAINED * idle:
        return BottleneckKind.LAUNCH, parts.other / idle
    # Elsewhere, the wait may be for data or for another rank.
    is_known = figures.data_wait is not None and setup.world_size == 1 and not setup.on_gpu
    others_run = is_known and (figures.host_cpu or 0.0) >= BUSY_HOST
    if others_run and idle > STANDS_STILL and parts.other >= EXPLAINED * idle:
        return BottleneckKind.CONTENTION, parts.other / idle
    if parts.compute >= EXPLAINED:
        throttled = parts.compute * (figures.throttled or 0.0)
        if throttled >= EXPLAINED:
            return BottleneckKind.THROTTLED, throttled
        return BottleneckKind.COMPUTE, parts.compute
    return BottleneckKind.UNCLEAR, None


def _text(
    kind: BottleneckKind, parts: StepBreakdown, figures: StepAverages, setup: RunSetup
) -> str:
    if kind is BottleneckKind.INPUT:
        return f"Input-bound: {parts.data:.0%} of each step waits for data."
    if kind is BottleneckKind.TRANSFER:
        return f"Transfer-bound: {parts.copies:.0%} of each step copies data to the GPU."
    if kind is BottleneckKind.LAUNCH:
        return (
            f"Launch-bound: the GPU is idle for {parts.other:.0%} of each step because the "
            "host launches kernels too slowly."
        )
    if kind is BottleneckKind.CONTENTION:
        return (
            f"CPU contention: {parts.other:.0%} of each step waits for a core. All cores are "
            f"{figures.host_cpu or 0:.0%} busy, {figures.process_cpu or 0:.1f} of {setup.cores} "
            "with the training process itself."
        )
    who = "the GPU computes" if setup.on_gpu else "the CPU computes"
    if setup.on_gpu and setup.world_size > 1:
        who += ", or waits for other ranks,"
    if kind is BottleneckKind.COMPUTE:
        text = f"Compute-bound: {who} for {parts.compute:.0%} of each step."
        if figures.throttled:
            text += f" For {figures.throttled:.0%} of the time {_lowered(figures)}."
        return text
    return f"Throttled: for {figures.throttled or 0:.0%} of the time {_lowered(figures)}."


def _lowered(figures: StepAverages) -> str:
    reasons = " and ".join(figures.throttle_words) or "a reason the driver does not report"
    text = f"the GPU lowers its clock ({reasons})"
    now, highest = figures.sm_clock, figures.sm_clock_max
    if now is not None and highest is not None and now < highest:
        text += f", {now:.0f} MHz instead of this run's {highest:.0f}"
    return text


def _unclear(parts: StepBreakdown, setup: RunSetup) -> str:
    shares: Mapping[str, float] = {
        "computing": parts.compute,
        "waiting for data": parts.data,
        "H2D copy time": parts.copies,
        "gaps between launches" if setup.on_gpu else "unexplained": parts.other,
    }
    listed = [f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.005]
    return f"No single cause: each step is {', '.join(listed)}."
