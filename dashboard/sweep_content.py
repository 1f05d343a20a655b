"""What a sweep's file contains, checked: it may come from another machine or be half a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from stepscope.common.formatting import printable

LONGEST_TEXT = 400  # Characters of one text that are shown.
DRIFT_P = 0.05  # Below it the lab says that the machine drifted.

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Time = Annotated[float, Meta(ge=0, lt=253_402_300_800)]
"""Epoch seconds up to the year 9999: a later time cannot be written as a date."""


class Text(str):
    """Text that can be shown."""

    __slots__ = ()


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

    @classmethod
    def _missing_(cls, value: object) -> Verdict | None:
        """Return `undecided` for a word of a later version."""
        return cls.UNDECIDED if isinstance(value, str) else None


class _Part(Struct, frozen=True, kw_only=True):
    """A part of the file; a number that is not finite becomes None."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                msgspec.structs.force_setattr(self, name, None)


class Loss(_Part, frozen=True, kw_only=True):
    """The loss of an arm after equal steps, against the baseline's."""

    verdict: Text | None = None
    text: Text | None = None


class Arm(_Part, frozen=True, kw_only=True):
    """One setting, or the baseline: its verdict and the medians of what was measured.

    Effects are relative differences of the throughput from the baseline's (0.12: 12 % faster).
    """

    name: Text = Text("?")
    label: Text = Text("?")
    verdict: Verdict | None = Verdict.MEASURING  # None: the baseline
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    resolution: float | None = None
    rounds: Count = 0
    reason: Text | None = None
    text: Text | None = None
    medians: dict[str, float | None] = field(name="metrics", default_factory=dict)
    loss: Loss = Loss()

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured, without what is missing or not finite."""
        found = self.medians.items()
        return {key: v for key, v in found if v is not None and math.isfinite(v)}

    @property
    def loss_not_shown_equal(self) -> bool:
        """True where the loss is neither worse nor shown equal or better."""
        return self.loss.verdict == "not_shown_equal"

    @property
    def loss_is_worse(self) -> bool:
        """True where it reached a larger loss after equal steps, or one that is no number."""
        return self.loss.verdict == "worse"


class Best(Arm, frozen=True, kw_only=True):
    """The best combination: the arms in it, the settings to take, its confirmed effect."""

    name: Text = Text("best")
    label: Text = Text("Best combination")
    names: tuple[Text, ...] = field(name="arms", default=())
    changes: dict[str, Any] = field(default_factory=dict)


class Progress(_Part, frozen=True, kw_only=True):
    """How far a sweep is: samples done of all that it may take, seconds left at `updated`."""

    done: Count = 0
    total: Count = 0
    doing: Text | None = None
    seconds_left: float | None = None

    @property
    def share(self) -> float:
        """Done of all, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0


class RoundSample(_Part, frozen=True, kw_only=True):
    """What the device did during one sample: clock in MHz, power in W, why it was throttled."""

    sm_clock: float | None = None
    power: float | None = None
    throttle: Text | None = None


class Round(_Part, frozen=True, kw_only=True):
    """The samples of one round by the arm's name; `phase` is what the round was for."""

    number: Count = field(name="round", default=0)
    phase: Text = Text("measuring")
    samples: dict[str, RoundSample] = field(default_factory=dict)


class Drift(_Part, frozen=True, kw_only=True):
    """Whether the baseline became faster or slower over the rounds, in words."""

    text: Text
    p: float | None = None

    @property
    def found(self) -> bool:
        """True where chance is no good explanation."""
        return self.p is not None and self.p < DRIFT_P


class Tried(_Part, frozen=True, kw_only=True):
    """A combination that was tried on the way to the best one."""

    names: tuple[Text, ...] = field(name="tried", default=())
    kept: bool = False
    reason: Text | None = None


class Plan(_Part, frozen=True, kw_only=True):
    """What the sweep was asked to measure."""

    config: dict[str, Any] = field(default_factory=dict)
    arms: list[Any] = field(default_factory=list)
    margin: float | None = None


class SweepContent(_Part, frozen=True, kw_only=True):
    """A sweep at one moment."""

    workload: Text
    status: SweepStatus
    created: Time
    updated: Time = 0.0
    reason: Text | None = None
    progress: Progress = Progress()
    baseline: Arm
    arms: Annotated[tuple[Arm, ...], Meta(max_length=200)] = ()
    best: Best | None = None
    drift: Drift | None = None
    tried: tuple[Tried, ...] = field(name="combining", default=())
    rounds: tuple[Round, ...] = ()
    plan: Plan = Plan()
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the baseline."""
        return self.plan.config


def to_content(sweep: Mapping[str, Any]) -> SweepContent:
    """Return a checked sweep.json. Raises ValueError where it is none."""
    try:
        given = _present(sweep)
        baseline = {"name": "baseline", **given.get("baseline", {}), "verdict": None}
        return msgspec.convert({**given, "baseline": baseline}, SweepContent, dec_hook=_text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"sweep.json: must be that of a sweep, got {str(error)[:80]!r}. Delete the folder."
        ) from error


def _present(value: Any) -> Any:
    """Return JSON values without keys whose value is null, except those of settings."""
    if isinstance(value, Mapping):
        return {
            name: part if name in ("config", "changes") else _present(part)
            for name, part in value.items()
            if part is not None
        }
    return [_present(part) for part in value] if isinstance(value, list) else value


def _text(kind: type, value: object) -> Text:
    if kind is not Text or not isinstance(value, str):
        raise ValueError("must be text")
    return Text(printable(value)[:LONGEST_TEXT])
