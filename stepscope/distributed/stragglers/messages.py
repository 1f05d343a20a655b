"""Messages about a straggler: the evidence and a recommendation by phase. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.common.formatting import format_short_time
from stepscope.distributed import ranks_text
from stepscope.distributed.stragglers.step_phases import StepPhase

_WHERE = {
    StepPhase.INPUT: "to get a batch",
    StepPhase.FORWARD: "in forward",
    StepPhase.BACKWARD: "in backward computation",
    StepPhase.OPTIMIZER: "in the optimizer's step",
    StepPhase.OTHER: "between the optimizer's step and the next batch",
}
_NEXT = {
    StepPhase.INPUT: "Check this rank's loading: its data shard, its disk or network storage, "
    "other programs on its cores; give its DataLoader more workers.",
    StepPhase.FORWARD: "Compare this rank's forward with another's: larger or longer samples, code "
    "that only this rank runs (prints, checks, metrics), lower clocks or another program on its "
    "GPU or cores. A profile of both ranks shows the difference.",
    StepPhase.BACKWARD: "Compare this rank's device with another's: clocks, temperature, other "
    "programs, sample sizes. Gradient hooks also run in backward.",
    StepPhase.OPTIMIZER: "Check what this rank does between backward() and the end of "
    "optimizer.step(): clipping, logging, reading values, or weights that only it updates.",
    StepPhase.OTHER: "Check what only this rank does between steps, such as logging, saving or "
    "validation; share it among ranks, or do it less often.",
    StepPhase.COMMUNICATION: "Reduce gradients less often (no_sync over several batches), send "
    "fewer bytes (a bf16 compression hook), try larger buckets, and check that the backend uses "
    "the fast link (NCCL_DEBUG=INFO names it).",
}
_WITHOUT_LOADER = "before it calls its model"
_NEXT_WITHOUT_LOADER = (
    "Check what only this rank does between optimizer.step() and the next model call: building "
    "its batch, logging, saving, validation. Without a DataLoader these cannot be separated."
)
UNEVEN_NEXT = (
    "Give all ranks the same amount of work each step: sort or bucket samples by length, pad to "
    "the same size, or balance the batches by tokens."
)


def where(phases: Sequence[StepPhase], *, has_loader: bool) -> str:
    """Return the text of the phases; without a DataLoader the input is all before the model."""
    return " and ".join(
        _WHERE[phase] if has_loader or phase is not StepPhase.INPUT else _WITHOUT_LOADER
        for phase in phases
    )


def next_step(phase: StepPhase, *, has_loader: bool = True) -> str:
    """Return the recommendation for a phase."""
    return _NEXT[phase] if has_loader or phase is not StepPhase.INPUT else _NEXT_WITHOUT_LOADER


def waits(waiting: int | None) -> str:
    """Return the begin of a sentence about the waiting rank; None for several ranks."""
    return "The others wait" if waiting is None else f"Rank {waiting} waits"


def text_of(
    ranks: Sequence[int],
    phases: Sequence[StepPhase],
    share: float,
    excess: Mapping[str, float],
    *,
    waiting: int | None = None,
    has_loader: bool = True,
) -> str:
    """Return the evidence as the begin of a sentence: the ranks, the time, the phases.

    `phases` explain the lateness, the longest first, and `excess` is the additional time of each.
    `waiting` is the waiting rank, or None for several ranks.

    >>> text_of([2], [StepPhase.FORWARD], 0.1, {"forward": 0.002})
    'The others wait for rank 2, 10% of each step: it takes 2.00 ms longer in forward than they do'
    """
    longer = " and ".join(
        f"{format_short_time(excess[phase.value])} longer {where([phase], has_loader=has_loader)}"
        for phase in phases
    )
    who = f"rank {ranks[0]}" if len(ranks) > 1 else "it"
    they = "they do" if waiting is None else f"rank {waiting} does"
    late = f"{waits(waiting)} for {ranks_text(sorted(ranks))}, {share:.0%} of each step"
    return f"{late}: {who} takes {longer} than {they}"
