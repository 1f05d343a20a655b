"""The checked content of sweep.json, which may come from another machine or be incomplete."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from stepscope.common.formatting import printable
from stepscope.lab.verdict_text import VariantVerdict

MAX_TEXT_LENGTH = 400

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Time = Annotated[float, Meta(ge=0, lt=253_402_300_800)]
"""Epoch seconds up to the year 9999: a later time cannot be written as a date."""


class SweepStatus(StrEnum):
    """States of a sweep: stopped ones can be resumed, failed ones ended by an error."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def live(self) -> bool:
        """True while the sweep may still write."""
        return self in (SweepStatus.PENDING, SweepStatus.RUNNING)


class Loss(Struct, frozen=True):
    """The loss of a variant after equal steps, relative to the baseline's."""

    verdict: str | None = None
    text: str | None = None


class VariantResult(Struct, frozen=True):
    """One setting, or the baseline: its verdict and the medians of its measurements.

    Effects are relative differences of the throughput from the baseline's (0.12: 12% faster).
    """

    name: str = "?"
    label: str = "?"
    verdict: VariantVerdict | None = VariantVerdict.MEASURING  # None: the baseline
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    resolution: float | None = None
    rounds: Count = 0
    reason: str | None = None
    text: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    loss: Loss = Loss()


class Best(VariantResult, frozen=True):
    """The best combination: its variants, the settings to apply, the confirmed effect."""

    name: str = "best"
    label: str = "Best combination"
    names: tuple[str, ...] = field(name="variants", default=())
    changes: dict[str, Any] = field(default_factory=dict)


class Progress(Struct, frozen=True):
    """Progress: trials done, their maximum, and the seconds left at `updated`."""

    done: Count = 0
    total: Count = 0
    doing: str | None = None
    seconds_left: float | None = None


class Plan(Struct, frozen=True):
    """The plan of the sweep."""

    config: dict[str, Any] = field(default_factory=dict)
    script: dict[str, Any] = field(default_factory=dict)  # instead of `config`
    variants: list[Any] = field(default_factory=list)
    minutes: float | None = None  # the time budget


class SweepContent(Struct, frozen=True):
    """A sweep at one moment."""

    workload: str
    status: SweepStatus
    created: Time
    baseline: VariantResult
    updated: Time = 0.0
    reason: str | None = None
    progress: Progress = Progress()
    variants: Annotated[tuple[VariantResult, ...], Meta(max_length=200)] = ()
    best: Best | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    throttled: str | None = None
    plan: Plan = Plan()
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The fraction done, 0 to 1: of the time budget, or of the trials without one."""
        progress = self.progress
        budget_s = 60 * (self.plan.minutes or 0.0)
        if budget_s > 0 and progress.seconds_left is not None:
            return min(1.0, max(0.0, 1 - progress.seconds_left / budget_s))
        return min(1.0, progress.done / progress.total) if progress.total > 0 else 0.0


def to_content(sweep: Mapping[str, Any]) -> SweepContent:
    """Return the checked content of a sweep.json. Raises ValueError."""
    try:
        given = _present(sweep)
        baseline = {"name": "baseline", **given.get("baseline", {}), "verdict": None}
        return msgspec.convert({**given, "baseline": baseline}, SweepContent)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"sweep.json: must be that of a sweep, got {str(error)[:80]!r}. Delete the folder."
        ) from error


def _present(value: Any, inside: str = "") -> Any:
    """Return printable JSON without null and infinite numbers, except in settings.

    `inside` is the name of the object: the entries of trials and metrics have any names.
    """
    if isinstance(value, Mapping):
        settings = () if inside in ("trials", "metrics") else ("config", "changes")
        return {
            name: part if name in settings else _present(part, name)
            for name, part in value.items()
            if not (part is None or _is_infinite(part))
        }
    if isinstance(value, list):
        return [_present(part, inside) for part in value]
    return printable(value)[:MAX_TEXT_LENGTH] if isinstance(value, str) else value


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
