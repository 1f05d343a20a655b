"""Estimate the batch size that fits from the memory of a script's first steps. Pure.

Weights, gradients and optimizer state do not depend on the batch. All else of the peak is assumed
to grow in proportion to it, also what stays after an update, such as the batch and its results. If
the batch has to shrink, that part is assumed to stay. So a factor is rather too small than too
large. There is no estimate if activations are too small or too uneven, or if several optimizers or
devices alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.common.formatting import format_bytes

HEADROOM = 0.10  # Share of the memory that the larger batch leaves.
LEAST_REST, LEAST_SHARE = 16 * 2**20, 0.02
"""The rest must be this large, and this share of the peak, to be taken for the batch's."""
UNEVEN = 0.25
"""Difference between the steps' rests, as a share of the largest, that is no steady step."""
MOST = 1000.0


@dataclass(frozen=True, slots=True)
class TrainingDevice:
    """Where a script trains: its kind, its name, its free bytes, and of a GPU its index."""

    kind: str
    name: str
    free: int
    index: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of one step: peaks since the step before, and what stays after it."""

    optimizer: int = 0  # The number of the optimizer that was stepped.
    waiting: int = 0  # Optimizers of other parameters that were not stepped yet.
    peak: int
    reserved: int | None
    reserved_now: int | None
    """After the update; less than the peak where the allocator gave memory back."""
    kept: int
    """Right after the update: weights, gradients, state, data, and on a CPU the whole process."""
    parameters: int
    gradients: int
    state: int
    device: TrainingDevice

    @property
    def known(self) -> int:
        """What does not depend on the batch."""
        return self.parameters + self.gradients + self.state

    @property
    def freed(self) -> int:
        """What the step takes and gives back."""
        return self.peak - self.kept

    @property
    def growing(self) -> int:
        """What may depend on the batch."""
        return self.peak - self.known


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """What fits; `factor` is by how much the batch may grow, None for the reason in `text`."""

    text: str
    factor: float | None
    parts: dict[str, int]
    peak: int | None = None
    reserved: int | None = None
    free: int | None = None
    room: int | None = None  # Bytes that this process could have in all: its own and the free ones.

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "measured_peak_bytes": self.peak,
            "measured_reserved_bytes": self.reserved,
            "parts": self.parts,
            "free_bytes": self.free,
            "available_bytes": self.room,
            "batch_factor": self.factor,
            "headroom": HEADROOM,
            "text": self.text,
        }


def report(steps: Sequence[StepMemory], why_none: str) -> FitReport:
    """Judge the steps; `why_none` is the sentence for none."""
    if not steps:
        return FitReport(text=why_none, factor=None, parts={})
    # The first step has no optimizer state before its update, and one-time allocations.
    steady = steps[1:] or steps
    largest = max(steady, key=lambda step: step.peak)
    own = largest.kept if largest.reserved_now is None else largest.reserved_now
    room = largest.device.free + own
    reason = (
        _incomparable(steps)
        or _too_little(largest)
        or _uneven([step.freed for step in steady])
        or _uneven([step.growing for step in steady])
    )
    factor, text = (None, reason) if reason else _factor(largest, room)
    return FitReport(
        text=text,
        factor=factor,
        parts={
            "trained_parameters": largest.parameters,
            "gradients": largest.gradients,
            "optimizer_state": largest.state,
            "others_kept": max(0, largest.kept - largest.known),
            "activations_and_the_rest": max(0, largest.freed),
        },
        peak=largest.peak,
        reserved=largest.reserved,
        free=largest.device.free,
        room=room,
    )


def _factor(largest: StepMemory, room: int) -> tuple[float, str]:
    # The allocator reserves more than it allocates, in proportion.
    overhead = 1.0 if largest.reserved is None else max(1.0, largest.reserved / largest.peak)
    allowed = room * (1 - HEADROOM) / overhead
    if allowed < largest.peak:  # the cautious assumption is that little shrinks with the batch
        factor = max(0.0, (allowed - largest.kept) / largest.freed)
        return factor, (
            f"This batch leaves less than {100 * HEADROOM:.0f} % free. About {factor:.2g}× this "
            "batch size would fit, assuming only memory freed by each update "
            f"({format_bytes(largest.freed)}) shrinks with it."
        )
    factor = min(MOST, (allowed - largest.known) / largest.growing)
    shown = f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
    return factor, (
        f"The batch can be about {shown}× as large and still leave "
        f"{100 * HEADROOM:.0f} % free, assuming the whole peak except trained parameters, "
        f"gradients and optimizer state ({format_bytes(largest.growing)}) scales with it."
    )


def _incomparable(steps: Sequence[StepMemory]) -> str | None:
    if len(steps) < 2:
        return "No advice: only one step was measured, and the first is not representative."
    if len({step.optimizer for step in steps}) > 1:
        return "No advice: several optimizers alternate, so their steps are not comparable."
    if steps[-1].waiting:
        return (
            "No advice: another optimizer has not stepped yet, so its memory is unknown. "
            "Measure more steps with --steps."
        )
    before, last = steps[-2].state, steps[-1].state
    if before < (1 - LEAST_SHARE) * last:
        return (
            "No advice: the optimizer state still grew at the last step "
            f"({format_bytes(before)} to {format_bytes(last)}). Measure more steps with --steps."
        )
    if len({(step.device.kind, step.device.index) for step in steps}) > 1:
        return "No advice: the steps ran on several devices, so they are not comparable."
    return None


def _too_little(largest: StepMemory) -> str | None:
    if largest.freed >= max(LEAST_REST, LEAST_SHARE * largest.peak):
        return None
    return (
        "No advice: activations and other memory are only "
        f"{format_bytes(max(0, largest.freed))} of a peak of {format_bytes(largest.peak)}, "
        "too little to tell how they scale with the batch."
    )


def _uneven(amounts: Sequence[int]) -> str | None:
    if min(amounts) >= (1 - UNEVEN) * max(amounts):
        return None
    return (
        f"No advice: the steps differ ({format_bytes(max(0, min(amounts)))} to "
        f"{format_bytes(max(amounts))} besides the weights), as with batches of varying length."
    )
