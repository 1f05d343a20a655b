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

LOOKS = (5, 8, 12)  # Rounds of the interim looks (docs/lab.md).
MAX_ROUNDS = 100

STARTUP_S = 4.0  # Of a child process: mostly the import of torch.
COMPILE_S = 40.0  # Assumed duration of torch.compile in a trial, until one was measured.


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

    `steps` are measured after `warmup` steps; 0 means automatic: a trial of the baseline measures
    `sample_s` seconds, at least 30 steps. `alpha` is the probability of any false "faster" or
    "slower" among the variants, `margin` the minimum effect, `same` the widest interval around 0
    that is called "no difference". `baselines` are the baseline trials per round; 0 becomes the
    integer nearest to the square root of the number of variants, which gives the shortest intervals
    for the number of trials (Dunnett 1955).

    A subclass adds what is measured, and overrides the methods that depend on it.
    """

    variants: tuple[Variant, ...]
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
        for name, (low, high) in _LIMITS.items():
            _check_number(name, getattr(self, name), low, high)
        _check_number("same", self.same, float(self.margin), 0.5)
        if not self.baselines:
            runnable = sum(variant.problem is None for variant in self.variants)
            object.__setattr__(self, "baselines", max(1, round(math.sqrt(runnable))))
        for look in self.looks:
            _check_number("looks", look, 2, 10**6)
        names = [variant.name for variant in self.variants]
        double = next((name for name in names if names.count(name) > 1), None)
        reserved = any(name.split(" ")[0] == "baseline" for name in names)
        rising = self.looks and list(self.looks) == sorted(set(self.looks))
        decides = isinstance(self.find_best, bool)
        for right, field, reason, remedy in (
            (decides, "find_best", "must be true or false", "Choose one"),
            (rising, "looks", "must rise from 2 or more", "Use the default"),
            (double is None, "variants", f"has {double!r} twice", "Remove one"),
            (not reserved, "variants", "the name baseline is reserved", "Choose another name"),
        ):
            if not right:
                raise ConfigError(ConfigIssue(field, reason, remedy))

    @property
    def workload(self) -> str:
        """The name of what is measured."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """A short description of the baseline."""
        raise NotImplementedError

    @property
    def budget_s(self) -> float | None:
        """The time limit of the sweep in seconds; None without one."""
        return None

    @property
    def probe(self) -> list[str]:
        """The settings of which the first trial, of the baseline, records whether they apply."""
        return []

    def after_probe(self, trial: Trial) -> tuple[SweepPlan, str | None]:
        """Return the plan without variants that do not apply, and why it cannot be measured."""
        return self, None

    @property
    def device_name(self) -> str | None:
        """The name of the device; None if unknown before the first trial."""
        return None

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

    def compiles(self, changes: Mapping[str, Any]) -> bool:
        """Return True if these changes turn torch.compile on, which needs a longer time limit."""
        return False

    def scaling(self, changes: Mapping[str, Any], verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verdict per device for sweep.json; empty on the devices of the baseline."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values for plan.json and sweep.json."""
        numbers = {spec.name: getattr(self, spec.name) for spec in fields(SweepPlan)}
        values: dict[str, Any] = self.subject() | msgspec.to_builtins(numbers)
        return values


def numbers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a SweepPlan from plan.json. Raises KeyError and TypeError."""
    names = [spec.name for spec in fields(SweepPlan) if spec.name != "variants"]
    return {name: values[name] for name in names} | {"looks": tuple(values["looks"])}


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
        "reason": None,
        "created": now,
        "updated": now,
        "workload": plan.workload,
        "plan": plan.to_dict(),
        "progress": None,
        "baseline": None,
        "variants": [],
        "combining": [],
        "best": None,
        "drift": None,
        "rounds": [],
        "machine": {},
    }
    write_json(folder / SWEEP_JSON, pending)


_LIMITS: dict[str, tuple[float, float]] = {
    "steps": (0, 10**8),
    "warmup": (0, 10**6),
    "max_rounds": (1, MAX_ROUNDS),
    "baselines": (0, MAX_ROUNDS),
    "seed": (0, 10**9),
    "alpha": (1e-6, 0.5),
    "margin": (0.0, 0.5),
    "sample_s": (0.01, 3600),
}
"""Inclusive bounds; a value whose lower bound is an int must be an int."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a sweep: if all variants are decided at the first look, and if none is."""

    low: float
    high: float


def estimate(plan: SweepPlan, sample_seconds: float | None = None) -> Estimate:
    """Return the duration of a sweep; only `high` includes the combination search.

    `sample_seconds` is the duration of a baseline trial in an earlier sweep
    (`folder.seconds_per_sample`). The default is the start of a process plus `sample_s`.
    """
    each = sample_seconds or STARTUP_S + plan.sample_s
    runnable = [variant for variant in plan.variants if variant.problem is None and variant.changes]
    compiled = sum(plan.compiles(variant.changes) for variant in runnable)
    a_round = each * (plan.baselines + len(runnable)) + COMPILE_S * compiled
    first = min(plan.looks[0], plan.max_rounds)
    high = a_round * plan.max_rounds
    if plan.find_best and plan.max_rounds >= plan.looks[0]:
        # Each further winner needs a comparison of two, and so does the confirmation.
        high += 2 * each * plan.max_rounds * len(runnable)
    return Estimate(each + a_round * first, each + high)


def _check_number(field: str, value: Any, low: float, high: float) -> None:
    kind = int if isinstance(low, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        reason = f"must be {low:g} to {high:g}, got {value!r}"
        raise ConfigError(ConfigIssue(field, reason, "Choose a value in this range"))
