"""Estimate the batch size that fits from the memory of a script's first steps; pure, no I/O.

Weights, gradients and optimizer state do not depend on the batch. All other bytes of the peak are
assumed to grow in proportion to it, also those kept after an update, such as the batch and its
results. If the batch has to shrink, kept bytes are assumed to stay. So a factor is rather too small
than too large. There is no estimate if activations are too small or too uneven, or if several
optimizers or devices alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.common.formatting import format_bytes

HEADROOM = 0.10  # Fraction of the memory that the larger batch leaves free.
MIN_REST_BYTES, MIN_REST_FRACTION = 16 * 2**20, 0.02  # Minimum of the peak that grows with a batch.
MAX_DIFFERENCE = 0.25  # Between comparable steps, as a fraction of the largest.
MAX_FACTOR = 1000.0


@dataclass(frozen=True, slots=True)
class TrainingDevice:
    """The device of a script: its kind, its name, its free bytes, and the index of a GPU."""

    kind: str
    name: str
    free: int
    index: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of one step: peaks since the step before, and what is kept after it."""

    optimizer: int = 0  # The index of the optimizer that was stepped.
    waiting: int = 0  # Optimizers of other parameters that were not stepped yet.
    peak: int
    reserved: int | None
    reserved_now: int | None  # After the update; less if the allocator has returned memory.
    kept: int  # After the update: weights, gradients, state, data; on a CPU the whole process.
    parameters: int
    gradients: int
    state: int
    device: TrainingDevice

    @property
    def known(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.state

    @property
    def freed(self) -> int:
        """Bytes that the step allocates and frees."""
        return self.peak - self.kept

    @property
    def growing(self) -> int:
        """Bytes that may depend on the batch."""
        return self.peak - self.known


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """The headroom for a larger batch; `factor` scales the batch, None for the reason in `text`."""

    text: str
    factor: float | None
    parts: dict[str, int]
    peak: int | None = None
    reserved: int | None = None
    free: int | None = None
    room: int | None = None  # Total bytes available to this process: its own and the free ones.

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
    """Return the headroom by these steps; `why_none` is the text without steps."""
    if not steps:
        return FitReport(text=why_none, factor=None, parts={})
    # The first step has no optimizer state before its update, and one-time allocations.
    steady = steps[1:] or steps
    largest = max(steady, key=lambda step: step.peak)
    own = largest.kept if largest.reserved_now is None else largest.reserved_now
    room = largest.device.free + own
    reason = _incomparable_reason(steps, largest) or (
        _uneven_reason([step.freed for step in steady])
        or _uneven_reason([step.growing for step in steady])
    )
    factor, text = _factor(largest, room) if reason is None else (None, f"No advice: {reason}.")
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
            f"This batch leaves less than {HEADROOM:.0%} free. About {factor:.2g}× this batch size "
            "would fit, assuming only memory freed by each update "
            f"({format_bytes(largest.freed)}) shrinks with it."
        )
    factor = min(MAX_FACTOR, (allowed - largest.known) / largest.growing)
    shown = f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
    return factor, (
        f"The batch can be about {shown}× as large and still leave {HEADROOM:.0%} free, assuming "
        "the whole peak except trained parameters, gradients and optimizer state "
        f"({format_bytes(largest.growing)}) scales with it."
    )


def _incomparable_reason(steps: Sequence[StepMemory], largest: StepMemory) -> str | None:
    if len(steps) < 2:
        return "only one step was measured, and the first is not representative"
    if len({step.optimizer for step in steps}) > 1:
        return "several optimizers alternate, so their steps are not comparable"
    if steps[-1].waiting:
        return (
            "another optimizer has not stepped yet, so its memory is unknown. Measure more steps "
            "with --steps"
        )
    before, last = steps[-2].state, steps[-1].state
    if before < (1 - MIN_REST_FRACTION) * last:
        return (
            f"the optimizer state still grew at the last step ({format_bytes(before)} to "
            f"{format_bytes(last)}). Measure more steps with --steps"
        )
    if len({(step.device.kind, step.device.index) for step in steps}) > 1:
        return "the steps ran on several devices, so they are not comparable"
    if largest.freed < max(MIN_REST_BYTES, MIN_REST_FRACTION * largest.peak):
        return (
            f"activations and other memory are only {format_bytes(max(0, largest.freed))} of a "
            f"peak of {format_bytes(largest.peak)}, too little to measure how they scale with "
            "the batch"
        )
    return None


def _uneven_reason(sizes: Sequence[int]) -> str | None:
    if min(sizes) >= (1 - MAX_DIFFERENCE) * max(sizes):
        return None
    return (
        f"the steps differ ({format_bytes(max(0, min(sizes)))} to {format_bytes(max(sizes))} "
        "besides the weights), as with batches of varying length"
    )
