"""Classify what costs a run its time. Pure; no I/O.

A step on a GPU has four parts: computing, idle while the host waits for data, copying a batch, and
idle between launches. A verdict explains the *visible wait*: the idle and copy time if it is more
than a fifth of a step, else the step itself. `share` is the fraction of it that the cause explains;
below EXPLAINED no cause is named. On a CPU the shares are those of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stepscope.common.formatting import format_short_time
from stepscope.diagnosis.code_time import delay_share, is_python_code, share_of
from stepscope.diagnosis.host_time import (
    CONTENTION,
    lines_that_cost,
    recompilation,
    slowing_down,
)
from stepscope.diagnosis.recommendations import advise_loader, next_to_try
from stepscope.diagnosis.results import (
    MIN_STEPS,
    BottleneckDiagnosis,
    BottleneckKind,
    IsSettingAllowed,
    StepAverages,
    StepBreakdown,
)
from stepscope.diagnosis.step_window import Slowdown
from stepscope.run_setup import RunSetup
from stepscope.session.training_facts import TrainingFacts

EXPLAINED = 0.8  # Minimum fraction of the visible wait for a single cause.
STANDS_STILL = 1 - EXPLAINED  # Minimum wait for data or copies in a step; critical in TraceML.
DATA_WAIT = 0.25  # Minimum fraction of the time that waits for data, on a CPU.
MIN_COST_S = 1.0  # Minimum time that a cause has cost on a CPU: below, no change is worth it.
GAPS = 0.25  # Minimum fraction of a step in gaps between launches: small gaps are usual.
AHEAD = 0.02  # Minimum fraction of a step that a host ahead of its GPU waits for it.


def verdicts(
    figures: StepAverages,
    setup: RunSetup,
    facts: TrainingFacts | None = None,
    slowdown: Slowdown | None = None,
    allowed: IsSettingAllowed = lambda name, value: True,
) -> list[BottleneckDiagnosis]:
    """Return what costs the run its time, the most important first; or one that abstains.

    `figures` is a window of steps; `allowed(field, value)` filters the recommended settings.
    """
    missing = MIN_STEPS - figures.steps
    if missing > 0 or figures.step_time <= 0:
        missing = max(1, missing)
        steps = "1 more step is" if missing == 1 else f"{missing} more steps are"
        text = f"Not enough data yet: {steps} needed; the first, slow steps do not count."
        return [BottleneckDiagnosis(kind=BottleneckKind.TOO_YOUNG, text=text)]
    if setup.simulated:
        text = "No diagnosis: the GPU is simulated, and its times are not those of a GPU."
        return [BottleneckDiagnosis(kind=BottleneckKind.SIMULATED, text=text)]
    facts = facts or TrainingFacts()
    if facts.compilation_count:
        setup = replace(setup, applied=setup.applied | {"compile"})
    by_parts = _by_parts(figures, setup, facts, allowed)
    by_lines = lines_that_cost(facts, setup, idle=by_parts.parts.idle if by_parts.parts else None)
    candidates = [
        recompilation(facts),
        slowing_down(slowdown, facts),
        *by_lines,
        by_parts if by_parts.kind.names_a_cause else None,
    ]
    found = [one for one in candidates if one is not None]
    # That the rest computes, or that kernels are launched slowly, is no news beside a cause.
    vague = BottleneckKind.COMPUTE, BottleneckKind.LAUNCH
    causes = [one for one in found if one.kind not in vague]
    by_cost = sorted(causes or found, key=lambda one: -_order(one))
    return by_cost or [by_parts]


def _order(found: BottleneckDiagnosis) -> float:
    """Return a number that is higher for a diagnosis to be shown earlier."""
    is_change = found.kind in (BottleneckKind.RECOMPILING, BottleneckKind.SLOWING)
    return 2.0 if is_change else found.share or 0.0


def _by_parts(
    figures: StepAverages, setup: RunSetup, facts: TrainingFacts, allowed: IsSettingAllowed
) -> BottleneckDiagnosis:
    """Classify a window of steps by the parts of a step."""
    parts = parts_of(figures, setup)
    if isinstance(parts, str):
        return BottleneckDiagnosis(kind=BottleneckKind.UNCLEAR, text=parts)
    kind, share = _cause(parts, figures, setup)
    delay = delay_share(facts)
    python, _ = share_of(facts, [line for line in facts.lines if is_python_code(line)])
    is_certain = _is_certain(figures, delay) and parts.compute - python >= EXPLAINED
    if kind is BottleneckKind.COMPUTE and not setup.on_gpu and not is_certain:
        kind = BottleneckKind.UNCLEAR
    if kind is BottleneckKind.UNCLEAR or share is None:
        text = _unclear(parts, setup)
        return BottleneckDiagnosis(kind=kind, text=text, parts=parts)
    text = _text(kind, parts, figures, setup)
    cause, step = None, next_to_try(kind.value, setup, allowed)
    if kind is BottleneckKind.INPUT and facts.loaders and not setup.own:
        advice = advise_loader(facts.loaders, setup, delay)
        text = f"{text}{advice.evidence}"
        cause, step = advice.cause, advice.next
    if kind is BottleneckKind.COMPUTE and setup.on_gpu and setup.world_size > 1:
        step = None  # NCCL's kernels occupy the GPU while they wait for other ranks.
    return BottleneckDiagnosis(
        kind=kind, text=text, cause=cause, share=share, next=step, parts=parts
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

    On a CPU, computing is forward, backward and the optimizer. Where these are not recorded it is
    the time without data wait, at most the CPU time of the process.
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
    if figures.computing is not None:
        compute = min(1.0 - wait, figures.computing / figures.step_time)
        other = 1.0 - wait - compute
        return StepBreakdown(compute=compute, data=wait, copies=0.0, other=other)
    if figures.process_cpu is None and wait < DATA_WAIT:
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
    if not setup.on_gpu:
        return _cause_on_cpu(parts, figures.steps * figures.step_time)
    idle = parts.idle
    if idle > STANDS_STILL:
        if parts.data >= EXPLAINED * idle:
            return BottleneckKind.INPUT, parts.data / idle
        if parts.copies >= EXPLAINED * idle:
            return BottleneckKind.TRANSFER, parts.copies / idle
    # Without measured copies, gaps may be copies.
    is_known = figures.copies is not None
    if is_known and idle >= GAPS and parts.other >= EXPLAINED * idle:
        return BottleneckKind.LAUNCH, parts.other / idle
    if parts.compute >= EXPLAINED:
        throttled = parts.compute * (figures.throttled or 0.0)
        if throttled >= EXPLAINED:
            return BottleneckKind.THROTTLED, throttled
        return BottleneckKind.COMPUTE, parts.compute
    return BottleneckKind.UNCLEAR, None


def _cause_on_cpu(parts: StepBreakdown, span_s: float) -> tuple[BottleneckKind, float | None]:
    for kind, share, least in (
        (BottleneckKind.INPUT, parts.data, DATA_WAIT),
        (BottleneckKind.COMPUTE, parts.compute, EXPLAINED),
    ):
        if share >= least and share * span_s >= MIN_COST_S:
            return kind, share
    return BottleneckKind.UNCLEAR, None


def _is_certain(figures: StepAverages, delay: float) -> bool:
    """Return True if what a CPU computes is not own code before it, nor waits for a core.

    Without batches from a loader, the script's own code before the forward pass counts as part of
    it.
    """
    return figures.data_wait is not None and delay < CONTENTION


def _text(
    kind: BottleneckKind, parts: StepBreakdown, figures: StepAverages, setup: RunSetup
) -> str:
    if kind is BottleneckKind.INPUT and figures.long_waits is not None:
        count, seconds = figures.long_waits
        return (
            f"Input-bound: {parts.data:.0%} of the time waits for data, most of it in {count} of "
            f"{figures.steps} steps ({format_short_time(seconds)} each)."
        )
    if kind is BottleneckKind.INPUT:
        return f"Input-bound: {parts.data:.0%} of each step waits for data."
    if kind is BottleneckKind.TRANSFER:
        return f"Transfer-bound: {parts.copies:.0%} of each step copies data to the GPU."
    if kind is BottleneckKind.LAUNCH:
        return (
            f"Launch-bound: the GPU is idle for {parts.other:.0%} of each step because the "
            "host launches kernels too slowly."
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
