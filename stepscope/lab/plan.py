"""The plan of a sweep, whatever it measures, and the estimate of its duration."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.config_issue import ConfigError, ConfigIssue
from stepscope.lab.folder import PLAN_JSON, SCHEMA, SWEEP_JSON, SweepError, Trial, write_json
from stepscope.lab.statistics import Rules

LOOKS = (5, 8, 12)  # Rounds of the interim looks (docs/lab.md).
MAX_ROUNDS = 100

SAMPLE_S = 2.0  # Duration of the measured steps of a trial, if their number is automatic.
TRIAL_S = 4.0 + SAMPLE_S  # Assumed duration of a trial: mostly the import of torch.
MAX_CONFIRMED = 3  # Trials per round of the confirmation: the baseline and two combinations.


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Changed settings as JSON values, none for a missing GPU; `problem`: why unsupported."""

    name: str
    label: str
    changes: Mapping[str, Any]
    problem: ConfigIssue | None = None


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The parameters of a sweep; `variants` are its variants. Raises ConfigError.

    `steps` are measured after `warmup` steps; 0 means automatic, by the first trial of the
    baseline. A subclass adds what is measured.
    """

    variants: tuple[Variant, ...]
    steps: int = 0
    warmup: int = 0
    max_rounds: int = 12
    looks: tuple[int, ...] = LOOKS
    find_best: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                reason = f"must be {low} to {high}, got {value!r}"
                raise ConfigError(ConfigIssue(name, reason, "Choose a value in this range"))
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names):
            double = max(names, key=names.count)
            raise ConfigError(ConfigIssue("variants", f"has {double!r} twice", "Remove one"))
        if any(name.split(" ")[0] == "baseline" for name in names):
            reason = "the name baseline is reserved"
            raise ConfigError(ConfigIssue("variants", reason, "Choose another name"))

    @property
    def runnable(self) -> list[Variant]:
        """The variants that have no problem."""
        return [variant for variant in self.variants if variant.problem is None]

    @property
    def baselines(self) -> int:
        """The baseline trials per round.

        The integer nearest to the square root of the number of variants gives the shortest
        intervals for the number of trials (Dunnett 1955).
        """
        return max(1, round(math.sqrt(len(self.runnable))))

    @property
    def rules(self) -> Rules:
        return Rules(looks=self.looks, max_rounds=self.max_rounds)

    @property
    def workload(self) -> str:
        """The name of what is measured."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """A short description of the baseline."""
        raise NotImplementedError

    @property
    def budget_s(self) -> float:
        """The time limit of the sweep in seconds; infinite without one."""
        return math.inf

    @property
    def probe(self) -> list[str]:
        """The settings of which the first trial, of the baseline, records whether they apply."""
        return []

    def after_probe(self, trial: Trial) -> SweepPlan:
        """Return the plan without variants that do not apply."""
        return self

    def subject(self) -> dict[str, Any]:
        """Return what is measured, as JSON values for plan.json and for the process of a trial."""
        raise NotImplementedError

    def combine(
        self, first: Mapping[str, Any], second: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        """Return the changes of two variants together, and why they are impossible, or None."""
        for name, value in second.items():
            if name in first and first[name] != value:
                return {}, f"{name} is {first[name]} in the combination already"
        return {**first, **second}, None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values for plan.json and sweep.json."""
        numbers = {spec.name: getattr(self, spec.name) for spec in fields(SweepPlan)}
        values: dict[str, Any] = self.subject() | msgspec.to_builtins(numbers)
        return values


def numbers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a SweepPlan but its variants. Raises KeyError and ValidationError."""
    names = [spec.name for spec in fields(SweepPlan) if spec.name != "variants"]
    return {name: values[name] for name in names} | {
        "looks": msgspec.convert(values["looks"], tuple[int, ...])
    }


def write_plan(folder: Path, plan: SweepPlan) -> None:
    """Write plan.json and a pending sweep.json. Raises OSError, SweepError for a user's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):  # a trial deletes and truncates files of the folder
        raise SweepError(f"{folder}: is no sweep and not empty. Give a new or an empty folder.")
    now = time.time()
    write_json(folder / PLAN_JSON, {"schema": SCHEMA, **plan.to_dict()})
    pending = {
        "schema": SCHEMA,
        "id": folder.name,
        "status": "pending",
        "created": now,
        "updated": now,
        "workload": plan.workload,
        "plan": plan.to_dict(),
    }
    write_json(folder / SWEEP_JSON, pending)


def estimate(plan: SweepPlan) -> tuple[float, float]:
    """Return the shortest and the longest duration of a sweep in seconds, before its first trial.

    It is the shortest if all variants are decided at the first look and none is combined.
    """
    a_round = TRIAL_S * (plan.baselines + len(plan.runnable))
    shortest = TRIAL_S + a_round * min(plan.looks[0], plan.max_rounds)
    longest = TRIAL_S + a_round * plan.max_rounds
    if plan.find_best and plan.rules.decision_rounds:
        longest += TRIAL_S * MAX_CONFIRMED * plan.max_rounds
    return shortest, longest


_LIMITS = {
    "steps": (0, 10**8),
    "warmup": (0, 10**6),
    "max_rounds": (1, MAX_ROUNDS),
    "seed": (0, 10**9),
}
"""Inclusive bounds."""
