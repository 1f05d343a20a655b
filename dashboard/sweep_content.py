"""What a sweep's file says, checked: sweep.json may come from another machine or be half a sweep.

Pure. What is missing or no number is None; `to_content` raises only where there is no sweep at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepscope.common.formatting import printable

Json = Mapping[str, Any]
LONGEST_TEXT = 400
"""Characters of one text that are shown."""
MOST_ARMS = 200
LAST_TIME = 253_402_300_800.0
"""The end of the year 9999 in epoch seconds: a later time cannot be written as a date."""
DRIFT_P = 0.05
"""Below it the lab says that the machine drifted."""


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


class Verdict(StrEnum):
    """What a sweep says of a setting; `measuring` only while it runs."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no_difference"
    UNDECIDED = "undecided"
    MEASURING = "measuring"
    FAILED = "failed"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One setting, or the baseline: its verdict and the medians of what was measured.

    Effects are relative differences of the throughput from the baseline's (0.12: 12 % faster).
    """

    name: str
    label: str
    verdict: Verdict | None  # None: the baseline
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    resolution: float | None = None
    rounds: int = 0
    reason: str | None = None
    text: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_verdict: str | None = None
    loss_text: str | None = None

    @property
    def loss_not_shown_equal(self) -> bool:
        """True where the loss is neither worse nor shown equal or better."""
        return self.loss_verdict == "not_shown_equal"

    @property
    def loss_is_worse(self) -> bool:
        """True where it reached a larger loss after equal steps, or one that is no number."""
        return self.loss_verdict == "worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best combination: the arms in it, the settings to take, its confirmed effect."""

    arm: Arm
    names: tuple[str, ...]
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a sweep is: samples done of all that it may take, seconds left at `updated`."""

    done: int
    total: int
    doing: str
    seconds_left: float | None

    @property
    def share(self) -> float:
        """Done of all, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSample:
    """What the device did during one sample: clock in MHz, power in W, why it was throttled."""

    sm_clock: float | None
    power: float | None
    throttle: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The samples of one round by the arm's name; `phase` is what the round was for."""

    number: int
    phase: str
    samples: Mapping[str, RoundSample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Whether the baseline became faster or slower over the rounds, in words."""

    found: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A combination that was tried on the way to the best one."""

    names: tuple[str, ...]
    kept: bool
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepContent:
    """A sweep at one moment."""

    workload: str
    status: SweepStatus
    reason: str | None
    created: float
    updated: float
    progress: Progress
    baseline: Arm
    arms: tuple[Arm, ...]
    best: Best | None
    drift: Drift | None
    tried: tuple[Tried, ...]
    rounds: tuple[Round, ...]
    config: Mapping[str, Any]
    machine: Mapping[str, Any]
    max_rounds: int | None
    margin: float | None


def to_content(sweep: Json) -> SweepContent:
    """Return a checked sweep.json. Raises ValueError where it is none."""
    try:
        status = SweepStatus(sweep["status"])
        created, workload = _time(sweep["created"]) or 0.0, text(sweep["workload"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"sweep.json: must be that of a sweep, got {str(error)[:80]!r}. Delete the folder."
        ) from error
    plan = _mapping(sweep.get("plan"))
    baseline = _mapping(sweep.get("baseline"))
    return SweepContent(
        workload=workload or "?",
        status=status,
        reason=text(sweep.get("reason")),
        created=created,
        updated=_time(sweep.get("updated")) or created,
        progress=_progress(_mapping(sweep.get("progress"))),
        baseline=_arm({"name": "baseline", **baseline, "verdict": None}),
        arms=tuple(_arm(_mapping(arm)) for arm in _list(sweep.get("arms"))[:MOST_ARMS]),
        best=_best(sweep.get("best")),
        drift=_drift(_mapping(sweep.get("drift"))),
        tried=tuple(_tried(_mapping(one)) for one in _list(sweep.get("combining"))),
        rounds=tuple(_round(_mapping(one)) for one in _list(sweep.get("rounds"))),
        config=_mapping(plan.get("config")),
        machine=_mapping(sweep.get("machine")),
        max_rounds=_whole(plan.get("max_rounds")),
        margin=number(plan.get("margin")),
    )


def number(value: object) -> float | None:
    """Return a finite number as it is, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int of hundreds of digits
        return None


def _time(value: object) -> float | None:
    """Return a time in epoch seconds, None for what is no date."""
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < LAST_TIME else None


def text(value: object) -> str | None:
    """Return a text that can be shown, None for no text."""
    return printable(value)[:LONGEST_TEXT] if isinstance(value, str) and value.strip() else None


def _arm(arm: Json) -> Arm:
    loss = _mapping(arm.get("loss"))
    metrics = {str(key): number(value) for key, value in _mapping(arm.get("metrics")).items()}
    name = text(arm.get("name")) or "?"
    return Arm(
        name=name,
        label=text(arm.get("label")) or name,
        verdict=_verdict(arm.get("verdict", "measuring")),
        effect=number(arm.get("effect")),
        low=number(arm.get("low")),
        high=number(arm.get("high")),
        resolution=number(arm.get("resolution")),
        rounds=_whole(arm.get("rounds")) or 0,
        reason=text(arm.get("reason")),
        text=text(arm.get("text")),
        metrics={key: value for key, value in metrics.items() if value is not None},
        loss_verdict=text(loss.get("verdict")),
        loss_text=text(loss.get("text")),
    )


def _verdict(word: object) -> Verdict | None:
    """Return a verdict, `undecided` for a word of a later version."""
    if word is None:
        return None
    try:
        return Verdict(str(word))
    except ValueError:
        return Verdict.UNDECIDED


def _best(best: object) -> Best | None:
    if not isinstance(best, Mapping):
        return None
    names = tuple(filter(None, map(text, _list(best.get("arms")))))
    arm = _arm({"name": "best", "label": "Best combination", **best})
    return Best(arm=arm, names=names, changes=_mapping(best.get("changes")))


def _progress(progress: Json) -> Progress:
    left = number(progress.get("seconds_left"))
    return Progress(
        done=_whole(progress.get("done")) or 0,
        total=_whole(progress.get("total")) or 0,
        doing=text(progress.get("doing")) or "",
        seconds_left=None if left is None else max(0.0, left),
    )


def _drift(drift: Json) -> Drift | None:
    words, p = text(drift.get("text")), number(drift.get("p"))
    return None if words is None else Drift(found=p is not None and p < DRIFT_P, text=words)


def _tried(one: Json) -> Tried:
    names = tuple(filter(None, map(text, _list(one.get("tried")))))
    return Tried(names=names, kept=one.get("kept") is True, reason=text(one.get("reason")))


def _round(one: Json) -> Round:
    samples = _mapping(one.get("samples"))
    return Round(
        number=_whole(one.get("round")) or 0,
        phase=text(one.get("phase")) or "measuring",
        samples={str(name): _round_sample(_mapping(sample)) for name, sample in samples.items()},
    )


def _round_sample(sample: Json) -> RoundSample:
    return RoundSample(
        sm_clock=number(sample.get("sm_clock")),
        power=number(sample.get("power")),
        throttle=text(sample.get("throttle")),
    )


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
