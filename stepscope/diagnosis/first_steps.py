"""What the memory of a script's first steps says about its batch size. Pure.

What stays after an update (weights, gradients, the optimizer's state, data) does not depend on the
batch. The rest of the peak, the activations and what comes with them, is taken to grow in
proportion to it. Where that rest is too
small or too uneven to be told from the noise, nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.formatting import format_bytes

HEADROOM = 0.10
"""Share of the memory that the larger batch leaves."""
LEAST_REST, LEAST_SHARE = 16 * 2**20, 0.02
"""The rest must be this large, and this share of the peak, to be taken for the batch's."""
UNEVEN = 0.25
"""Difference between the steps' rests, as a share of the largest, that is no steady step."""
MOST = 1000.0


@dataclass(frozen=True, slots=True)
class Device:
    """Where a script trains: its kind, its name, and its free bytes."""

    kind: str
    name: str
    free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of one step: peaks since the step before, and what stays after it."""

    optimizer: str
    peak: int
    reserved: int | None
    kept: int
    """Right after the update: weights, gradients, state, data, and on a CPU the whole process."""
    parameters: int
    gradients: int
    state: int
    device: Device


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """What fits; `factor` is by how much the batch may grow, None for the reason in `text`."""

    text: str
    factor: float | None
    parts: dict[str, int]
    peak: int | None = None
    reserved: int | None = None
    free: int | None = None
    room: int | None = None
    """Bytes that this process could have in all: its own and the free ones."""

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
    # The first step has no optimizer state before its update, and what is made once.
    steady = steps[1:] or steps
    largest = max(steady, key=lambda step: step.peak)
    device, rest = largest.device, largest.peak - largest.kept
    parts = {
        "trained_parameters": largest.parameters,
        "gradients": largest.gradients,
        "optimizer_state": largest.state,
        "others_kept": max(0, largest.kept - _known(largest)),
        "activations_and_the_rest": max(0, rest),
    }
    room = device.free + (largest.kept if largest.reserved is None else largest.reserved)
    factor, why = _factor(steps, rest, room)
    return FitReport(
        text=why,
        factor=factor,
        parts=parts,
        peak=largest.peak,
        reserved=largest.reserved,
        free=device.free,
        room=room,
    )


def _known(step: StepMemory) -> int:
    return step.parameters + step.gradients + step.state


def _factor(steps: Sequence[StepMemory], rest: int, room: int) -> tuple[float | None, str]:
    steady = steps[1:] or steps
    largest = max(steady, key=lambda step: step.peak)
    if len(steps) < 2:
        return None, "Only one step was measured, and the first is not like the others: no advice."
    if len({step.optimizer for step in steps}) > 1:
        return None, "Several optimizers take turns, so their steps cannot be compared: no advice."
    if rest < max(LEAST_REST, LEAST_SHARE * largest.peak):
        return None, (
            f"Activations and the rest are {format_bytes(max(0, rest))} of a peak of "
            f"{format_bytes(largest.peak)}: too little to tell how they grow with the batch."
        )
    least = min(step.peak - step.kept for step in steady)
    if least < (1 - UNEVEN) * rest:
        return None, (
            f"The steps differ ({format_bytes(max(0, least))} to {format_bytes(rest)} besides the "
            "weights), as batches of uneven length do: no advice."
        )
    # The allocator keeps more than it hands out, in proportion.
    overhead = 1.0 if largest.reserved is None else max(1.0, largest.reserved / largest.peak)
    allowed = room * (1 - HEADROOM) / overhead - largest.kept
    factor = max(0.0, min(MOST, allowed / rest))
    if factor < 1:
        return factor, (
            f"The batch leaves less than {100 * HEADROOM:.0f} % free. About {factor:.2g} times the "
            "batch would, if all that is freed again grows in proportion to it."
        )
    return factor, (
        f"The batch can be about {_short(factor)} times as large and leave {100 * HEADROOM:.0f} % "
        "free, if all that is freed again grows in proportion to it."
    )


def _short(factor: float) -> str:
    return f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
