"""A sweep before it runs: its plan, how long it will take, and the names that the page needs.

No torch import: the lab page reads this module before torch is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import CompileMode, ConfigError, ConfigIssue, RunConfig
from trainer.lab.folder import new_sweep_folder, read_sweep, write_plan
from trainer.lab.presets import PRESETS, Preset
from trainer.lab.variants import Variant, arms, make_arm

__all__ = [
    "PRESETS",
    "Estimate",
    "Preset",
    "SweepPlan",
    "Variant",
    "arms",
    "estimate",
    "make_arm",
    "new_sweep_folder",
    "read_sweep",
    "write_plan",
]

LOOKS = (5, 8, 12)
"""Rounds after which arms are judged (docs/lab.md)."""
MAX_ROUNDS = 100

STARTUP_S = 4.0
"""What a child process takes beside its steps: mostly the import of torch."""
COMPILE_S = 40.0
"""A guess of what torch.compile adds to a sample, until one was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """What a sweep measures. Raises ConfigError for what no sweep could do.

    `steps` are the measured ones, after `warmup`; where one is 0 the sweep chooses it, so that a
    sample of the baseline measures `sample_s` seconds, and at least 30 steps. `alpha` is the chance
    of any false "faster" or "slower" among the arms. `margin` is the difference below which nothing
    is claimed, `same` the widest interval around 0 that is called "no difference". `baselines` are
    the runs of the baseline in a round; 0 becomes the number nearest to the square root of the
    number of arms, which gives the shortest intervals for the samples (Dunnett 1955).
    """

    config: RunConfig
    arms: tuple[Variant, ...]
    steps: int = 0
    warmup: int = 0
    max_rounds: int = 12
    looks: tuple[int, ...] = LOOKS
    alpha: float = 0.05
    margin: float = 0.01
    same: float = 0.03
    baselines: int = 0
    find_best: bool = True
    sample_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 0, 10**8)
        _whole("warmup", self.warmup, 0, 10**6)
        _whole("max_rounds", self.max_rounds, 1, MAX_ROUNDS)
        _number("alpha", self.alpha, 1e-6, 0.5)
        _number("margin", self.margin, 0.0, 0.5)
        _number("same", self.same, self.margin, 0.5)
        _number("sample_s", self.sample_s, 0.01, 3600)
        _whole("seed", self.seed, 0, 10**9)
        _whole("baselines", self.baselines, 0, MAX_ROUNDS)
        if not self.baselines:
            runnable = sum(arm.problem is None for arm in self.arms)
            object.__setattr__(self, "baselines", max(1, round(math.sqrt(runnable))))
        for look in self.looks:
            _whole("looks", look, 2, 10**6)
        if not isinstance(self.find_best, bool):
            raise ConfigError(
                ConfigIssue(
                    "find_best", f"must be true or false, got {self.find_best!r}", "Choose one"
                )
            )
        if not self.looks or list(self.looks) != sorted(set(self.looks)):
            raise ConfigError(
                ConfigIssue("looks", "must rise from 2 or more", "Leave them as they are")
            )
        names = [arm.name for arm in self.arms]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(ConfigIssue("arms", f"has {double!r} twice", "Leave one out"))
        if any(name.split(" ")[0] == "baseline" for name in names):
            raise ConfigError(ConfigIssue("arms", "no arm can be named baseline", "Choose another"))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plan.json and sweep.json hold it."""
        return {
            "config": self.config.to_dict(),
            "arms": [arm.to_dict() for arm in self.arms],
            "steps": self.steps,
            "warmup": self.warmup,
            "max_rounds": self.max_rounds,
            "looks": list(self.looks),
            "alpha": self.alpha,
            "margin": self.margin,
            "same": self.same,
            "baselines": self.baselines,
            "find_best": self.find_best,
            "sample_s": self.sample_s,
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SweepPlan:
        """The inverse of `to_dict`; what is missing gets its default.

        A plan without `baselines` is of a version that ran the baseline once a round.

        Raises ConfigError for a value out of its bounds, KeyError, TypeError and ValueError for a
        file that is no plan.
        """
        given = {"baselines": 1} | {name: values[name] for name in _SIMPLE if name in values}
        if "looks" in values:
            given["looks"] = tuple(values["looks"])
        found = tuple(Variant.from_dict(arm) for arm in values["arms"])
        return cls(config=RunConfig.from_dict(values["config"]), arms=found, **given)


_SIMPLE = (
    *("steps", "warmup", "max_rounds", "find_best", "sample_s", "seed"),
    *("alpha", "margin", "same", "baselines"),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that a sweep takes: if every arm is decided at the first look, and if none is."""

    low: float
    high: float


def estimate(plan: SweepPlan, sample_seconds: float | None = None) -> Estimate:
    """Return how long the sweep takes; the search for the best combination is in `high` only.

    `sample_seconds` is what a sample of the baseline took in an earlier sweep
    (`folder.seconds_per_sample`). Without it the start of a process and `sample_s` are assumed.
    """
    each = sample_seconds or STARTUP_S + plan.sample_s
    runnable = [arm for arm in plan.arms if arm.problem is None and arm.changes]
    a_round = each * (plan.baselines + len(runnable)) + sum(_compiling(arm) for arm in runnable)
    first = min(plan.looks[0], plan.max_rounds)
    high = a_round * plan.max_rounds
    if plan.find_best and plan.max_rounds >= plan.looks[0]:
        # Each further winner has a contest of two, and so has the confirmation.
        high += 2 * each * plan.max_rounds * len(runnable)
    return Estimate(each + a_round * first, each + high)


def _compiling(arm: Variant) -> float:
    return (
        COMPILE_S if arm.changes.get("compile_mode", CompileMode.NONE) != CompileMode.NONE else 0.0
    )


def with_problems(plan: SweepPlan, devices: Any) -> SweepPlan:
    """Return the plan with the `problem` of each arm as it is on these devices."""
    return replace(
        plan,
        arms=tuple(
            arm if not arm.changes else make_arm(arm.changes, plan.config, devices, name=arm.name)
            for arm in plan.arms
        ),
    )


def _number(field: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ConfigError(
            ConfigIssue(
                field, f"must be {low:g} to {high:g}, got {value!r}", "Choose a value between"
            )
        )


def _whole(field: str, value: Any, low: int, high: int) -> None:
    _number(field, value, low, high)
    if not isinstance(value, int):
        raise ConfigError(
            ConfigIssue(field, f"must be a whole number, got {value!r}", "Leave out its fraction")
        )
