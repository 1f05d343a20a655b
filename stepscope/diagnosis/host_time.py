"""Diagnoses by the training thread: waiting, own code, compilations, slower steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.common.formatting import format_short_time
from stepscope.diagnosis.code_time import (
    delay_share,
    is_python_code,
    line_text,
    line_that_grew,
    reaches,
    sample_count,
    share_of,
)
from stepscope.diagnosis.results import BottleneckDiagnosis, BottleneckKind
from stepscope.diagnosis.step_window import Slowdown
from stepscope.run_setup import Recommendation, RunSetup
from stepscope.session.code_sampler import OWN_CODE
from stepscope.session.training_facts import CodeLine, TrainingFacts

MIN_TIME_S = 3.0  # Minimum time that was sampled
BLOCKED, HOST, SYNC, CONTENTION = 0.25, 0.4, 0.25, 0.2
"""Minimum fractions of the time."""
GPU_IDLE = 0.2  # Minimum idle fraction of a GPU whose host waits for it.
ASLEEP = 0.6  # Minimum fraction of a line's time asleep, to count as waiting.
FIRST_STEPS = 10  # Compilations up to this step are usual.
USUAL_COMPILATIONS = 2  # later ones: another shape, and the one for all shapes
MAX_STEPS_NAMED = 5
SYNC_CALLS = (".item(", ".cpu(", ".tolist(", ".numpy(", ".nonzero(", "synchronize(", "print(")


def lines_that_cost(
    facts: TrainingFacts, setup: RunSetup, idle: float | None
) -> Iterator[BottleneckDiagnosis]:
    """Yield what the samples of the thread show; `idle` is the idle fraction of the device."""
    if sum(period.wall_s for period in facts.periods) < MIN_TIME_S:
        return
    delay = delay_share(facts)
    if delay >= CONTENTION:
        yield BottleneckDiagnosis(
            kind=BottleneckKind.CONTENTION,
            share=delay,
            text=f"CPU contention: for {delay:.0%} of the time the training thread was ready to "
            "run, but had no core.",
            next=Recommendation(
                "End other programs on this host, or use fewer threads or DataLoader workers."
            ),
        )
    if setup.on_gpu:
        share, line = share_of(facts, [one for one in facts.lines if _waits_for_gpu(one)])
        if line is not None and reaches(facts, share, SYNC) and (idle or 0.0) >= GPU_IDLE:
            yield BottleneckDiagnosis(
                kind=BottleneckKind.SYNC,
                share=share,
                text=f"Sync-bound: for {share:.0%} of the time the host waits for the GPU in "
                f"{line_text(line)}, and launches nothing; the GPU is idle for {idle:.0%}.",
                next=Recommendation("Read the value later, or every N-th step."),
            )
    outside = [line for line in facts.lines if _is_outside(line, setup)]
    share, line = share_of(facts, [one for one in outside if _waits(one)])
    if line is not None and reaches(facts, share, BLOCKED):
        yield BottleneckDiagnosis(
            kind=BottleneckKind.BLOCKED,
            share=share,
            text=f"Blocked: for {share:.0%} of the time the training thread sleeps, most of it in "
            f"{line_text(line)}.",
            next=Recommendation("Leave it out, do it every N-th step, or in another thread."),
        )
    share, line = share_of(facts, [one for one in outside if not _waits(one)])
    if line is not None and reaches(facts, share, HOST):
        yield BottleneckDiagnosis(
            kind=BottleneckKind.HOST,
            share=share,
            text=f"Host-bound: {share:.0%} of the time is the script's own code beside loading, "
            f"forward, backward and optimizer, most of it in {line_text(line)}.",
            next=Recommendation(
                "Vectorize it, or do it in other processes."
                if line.before and line.phase != OWN_CODE
                else "Do it every N-th step, or after the training."
            ),
        )


def recompilation(facts: TrainingFacts) -> BottleneckDiagnosis | None:
    """Return the diagnosis of a model that torch.compile compiles again and again."""
    late = [one for one in facts.compilations if one.step > FIRST_STEPS]
    if len(late) <= USUAL_COMPILATIONS:
        return None
    numbers = sorted({one.step for one in late})[-MAX_STEPS_NAMED:]
    steps = ", ".join(f"{number:,}" for number in numbers)
    reason = next((one.reason for one in reversed(late) if one.reason), "")
    # Torch adds the source line, and the stack.
    first = reason.partition("\n")[0].partition("  #")[0].strip()
    why = f" Torch's reason: {first.partition(': ')[2] or first}." if first else ""
    remedy = "Set TORCH_LOGS=recompiles to see every reason."
    if "size mismatch" in reason or "stride mismatch" in reason:
        remedy = "Pad the batches to a few sizes, or compile with dynamic=True."
    return BottleneckDiagnosis(
        kind=BottleneckKind.RECOMPILING,
        text=f"Recompiling: torch.compile has compiled {facts.compilation_count} graphs, the "
        f"latest at steps {steps}.{why}",
        next=Recommendation(remedy),
    )


def slowing_down(slowdown: Slowdown | None, facts: TrainingFacts) -> BottleneckDiagnosis | None:
    """Return the diagnosis of steps that take longer and longer, with the line that grew."""
    if slowdown is None:
        return None
    line = line_that_grew(facts) if sample_count(facts) else None
    where = f", most of it in {line_text(line)}" if line is not None else ""
    return BottleneckDiagnosis(
        kind=BottleneckKind.SLOWING,
        text=f"Slowing down: a step takes {format_short_time(slowdown.end_s)} now and took "
        f"{format_short_time(slowdown.start_s)} at the start{where}.",
        next=Recommendation("Check what grows from step to step: a list, a graph, a batch."),
    )


def _is_outside(line: CodeLine, setup: RunSetup) -> bool:
    """Return True for the script's own code beside loading and the computing of a step."""
    if setup.on_gpu and _waits_for_gpu(line):
        return False
    if is_python_code(line):
        return True
    if line.phase == OWN_CODE:
        return not (line.in_torch and setup.world_size > 1)  # it may wait for other ranks
    # Without a loader, or between batch and backward(), only another package is surely outside.
    is_between = line.phase in ("", "forward")
    return is_between and not line.in_torch and (line.below != "" or _waits(line))


def _waits(line: CodeLine) -> bool:
    return line.asleep >= ASLEEP * sum(line.counts)


def _waits_for_gpu(line: CodeLine) -> bool:
    return any(call in line.call for call in SYNC_CALLS)
