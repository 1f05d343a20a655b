"""Classify what the steps of a run wait for. Pure.

A step on a GPU has four parts: computing, idle while the host waits for data, copying a batch, and
idle between launches. On a CPU there are no copies and no launches.

A verdict explains the *visible wait*: the idle and copy time if it is more than a fifth of a step,
else the step itself. `share` is the part of it that the cause explains; below EXPLAINED no cause is
named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepscope.bottleneck.recommendations import Recommendation, RunSetup, next_to_try

MIN_STEPS = 20  # Minimum number of steady steps, as in TraceML.
EXPLAINED = 0.8  # Minimum share of the visible wait for a single cause.
STANDS_STILL = 1 - EXPLAINED
"""Share of a step from which waiting for data or copies gives a verdict; critical in TraceML."""
GAPS = 0.25
"""Share of a step from which gaps between launches give a verdict: small ones are usual."""
AHEAD = 0.02  # Minimum share of a step that a host which is ahead of the GPU waits for it.
BUSY_HOST = 0.9  # Use of all cores above which a waiting process waits for a core.

IsSettingAllowed = Callable[[str, Any], bool]


class BottleneckKind(StrEnum):
    """What a step waits for. The last two name no cause."""

    INPUT = "input-bound"
    TRANSFER = "transfer-bound"
    LAUNCH = "launch-bound"
    COMPUTE = "compute-bound"
    THROTTLED = "throttled"
    STRAGGLER = "straggler"
    """Found by `distributed/stragglers` from the steps of all ranks, never by `verdict`."""
    NOT_FINITE = "loss-not-finite"  # Found in the events of an ended run, never by `verdict`.
    UNCLEAR = "no single cause"
    TOO_YOUNG = "not enough data yet"

    @property
    def names_a_cause(self) -> bool:
        """False for a verdict that abstains."""
        return self not in (BottleneckKind.UNCLEAR, BottleneckKind.TOO_YOUNG)


PHASES = {
    BottleneckKind.INPUT: "data",
    BottleneckKind.TRANSFER: "copy",
    BottleneckKind.LAUNCH: "launch",
}
"""The part of a step that a kind is about; all others are about "compute"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAverages:
    """Means over a window of steady steps; None where the run does not record it.

    Times are seconds a step. `utilization`, `throttled` and `host_cpu` are shares from 0 to 1: of
    time, of readings with an abnormal reason to lower the clocks, and of all cores. `process_cpu`
    is in cores. Clocks are in MHz, `sm_clock_max` is the run's highest.
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
    """The parts of a step as shares of its wall time; they sum to 1.

    `other` is gaps between launches on a GPU; on a CPU, other waiting than for data.
    """

    compute: float
    data: float
    copies: float
    other: float

    @property
    def idle(self) -> float:
        """The share in which the device does not compute."""
        return self.data + self.copies + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckDiagnosis:
    """One sentence on a run's steps, and what to try next.

    `share` is None without a cause, `parts` where they are unknown. `missing_steps` is 0 except
    while the run is too young.
    """

    kind: BottleneckKind
    text: str
    share: float | None = None
    next: Recommendation | None = None
    parts: StepBreakdown | None = None
    missing_steps: int = 0
    figures: StepAverages = field(default_factory=lambda: StepAverages(steps=0))

    @property
    def phase(self) -> str:
        """The part of a step that it is about."""
        return PHASES.get(self.kind, "compute")


def verdict(
    figures: StepAverages, setup: RunSetup, allowed: IsSettingAllowed = lambda name, value: True
) -> BottleneckDiagnosis:
    """Classify a window of steps; `allowed(field, value)` is whether a setting may be proposed."""
    missing = MIN_STEPS - figures.steps
    if missing > 0 or figures.step_time <= 0:
        missing = max(1, missing)
        steps = "1 more step is" if missing == 1 else f"{missing} more steps are"
        text = f"Not enough data yet: {steps} needed; the first, slow steps do not count."
        return BottleneckDiagnosis(
            kind=BottleneckKind.TOO_YOUNG, text=text, missing_steps=missing, figures=figures
        )
    parts = parts_of(figures, setup)
    if isinstance(parts, str):
        return BottleneckDiagnosis(kind=BottleneckKind.UNCLEAR, text=parts, figures=figures)
    kind, share = _cause(parts, figures, setup)
    if kind is BottleneckKind.UNCLEAR or share is None:
        text = _unclear(parts, figures, setup)
        return BottleneckDiagnosis(kind=kind, text=text, parts=parts, figures=figures)
    return BottleneckDiagnosis(
        kind=kind,
        text=_text(kind, parts, figures, setup),
        share=share,
        next=next_to_try(kind.value, setup, allowed),
        parts=parts,
        figures=figures,
    )


def parts_of(figures: StepAverages, setup: RunSetup) -> StepBreakdown | str:
    """Return the parts of a step, or a sentence about the missing figure.

    On a GPU, with T the step time:

    - Computing is the smaller of the time between the step's two events, which includes gaps, and
      utilization × T, which includes other processes. Without a utilization the events count only
      if the host waits for the GPU: then there are no gaps.
    - Of the rest, copies come first if they share the stream that computes, else data.
    - Waiting for data counts as far as the device is idle meanwhile. A copy that blocks the host is
      part of the measured data wait, and is subtracted from it.
    - What remains are gaps between launches.

    On a CPU, computing is what is not data wait, at most the CPU time of the process. The rest is
    waiting, for a core if all are in use. Without that CPU time a short data wait gives no verdict.
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
        return (
            "No diagnosis: without GPU utilization, computing and idle time cannot be told apart."
        )
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
        return (
            "No diagnosis: whether the process computes or waits is unknown; that takes at "
            "least a second of steps."
        )
    other = 0.0
    if figures.process_cpu is not None:
        other = max(0.0, 1.0 - wait - figures.process_cpu)
    return StepBreakdown(compute=1.0 - wait - other, data=wait, copies=0.0, other=other)


def _busy(figures: StepAverages) -> float | None:
    """Return the share of a step in which the GPU computes; None where it cannot be told."""
    between = figures.device_time
    if figures.utilization is None:
        unsure = figures.gpu_wait is None or figures.gpu_wait < AHEAD * figures.step_time
        return None if between is None or unsure else min(1.0, between / figures.step_time)
    return min(1.0, figures.utilization, 1.0 if between is None else between / figures.step_time)


def _cause(
    parts: StepBreakdown, figures: StepAverages, setup: RunSetup
) -> tuple[BottleneckKind, float | None]:
    """Return the kind and the share of the visible wait that it explains."""
    idle = parts.idle
    if idle > STANDS_STILL:
        if parts.data >= EXPLAINED * idle:
            return BottleneckKind.INPUT, parts.data / idle
        if parts.copies >= EXPLAINED * idle:
            return BottleneckKind.TRANSFER, parts.copies / idle
    # Gaps that may be copies nobody measured are not called launches.
    launches = setup.on_gpu and figures.copies is not None
    if launches and idle >= GAPS and parts.other >= EXPLAINED * idle:
        return BottleneckKind.LAUNCH, parts.other / idle
    if parts.compute >= EXPLAINED:
        throttled = parts.compute * (figures.throttled or 0.0)
        if throttled >= EXPLAINED:
            return BottleneckKind.THROTTLED, throttled
        return BottleneckKind.COMPUTE, parts.compute
    return BottleneckKind.UNCLEAR, None


def percent(share: float) -> str:
    """Return a share from 0 to 1 as whole percent.

    >>> percent(0.634)
    '63%'
    """
    return f"{100 * share:.0f}%"


def _text(
    kind: BottleneckKind, parts: StepBreakdown, figures: StepAverages, setup: RunSetup
) -> str:
    if kind is BottleneckKind.INPUT:
        return f"Input-bound: {percent(parts.data)} of each step waits for data."
    if kind is BottleneckKind.TRANSFER:
        return f"Transfer-bound: {percent(parts.copies)} of each step copies data to the GPU."
    if kind is BottleneckKind.LAUNCH:
        return (
            f"Launch-bound: the GPU is idle for {percent(parts.other)} of each step because the "
            "host launches kernels too slowly."
        )
    who = "the GPU computes" if setup.on_gpu else "the CPU computes"
    if kind is BottleneckKind.COMPUTE:
        text = f"Compute-bound: {who} for {percent(parts.compute)} of each step."
        if figures.throttled:
            text += f" For {percent(figures.throttled)} of the time {_lowered(figures)}."
        return text
    return f"Throttled: for {percent(figures.throttled or 0)} of the time {_lowered(figures)}."


def _lowered(figures: StepAverages) -> str:
    reasons = " and ".join(figures.throttle_words) or "a reason the driver does not report"
    text = f"the GPU lowers its clock ({reasons})"
    now, highest = figures.sm_clock, figures.sm_clock_max
    if now is not None and highest is not None and now < highest:
        text += f", {now:.0f} MHz instead of this run's {highest:.0f}"
    return text


def _unclear(parts: StepBreakdown, figures: StepAverages, setup: RunSetup) -> str:
    crowded = (figures.host_cpu or 0.0) >= BUSY_HOST
    unnamed = "waiting for a CPU core" if crowded else "waiting for something else"
    shares: Mapping[str, float] = {
        "computing": parts.compute,
        "waiting for data": parts.data,
        "H2D copy time": parts.copies,
        "gaps between launches" if setup.on_gpu else unnamed: parts.other,
    }
    said = [f"{percent(share)} {name}" for name, share in shares.items() if share >= 0.005]
    return f"No single cause: each step is {', '.join(said)}."
