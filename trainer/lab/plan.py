"""The plan of a sweep over a built-in workload. No torch import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.common.config_issue import ConfigError
from stepscope.lab.plan import SweepPlan, numbers_of
from trainer.config import CompileMode, RunConfig, Strategy
from trainer.config_validation import TrainDevice, validate
from trainer.lab.variants import (
    changed,
    make_variant,
    own_changes,
    own_with,
    variant_from_dict,
)


@dataclass(frozen=True, kw_only=True)
class WorkloadPlan(SweepPlan):
    """A sweep over a workload: `config` is the baseline. Raises ConfigError.

    `devices` are those of this machine, and not a part of plan.json.
    """

    config: RunConfig
    devices: Sequence[TrainDevice] = field(default=(), compare=False, repr=False)

    @property
    def workload(self) -> str:
        return str(self.config.workload)

    @property
    def label(self) -> str:
        config, device = self.config, "CPU" if self.config.device == "cpu" else "GPU"
        return f"{config.workload} on {device}, {config.precision}, batch_size {config.batch_size}"

    @property
    def device_name(self) -> str | None:
        """The name of the baseline's device; None if it is not in this machine."""
        return next((one.name for one in self.devices if one.id == self.config.device), None)

    def subject(self) -> dict[str, Any]:
        return {"config": self.config.to_dict()}

    def combine(
        self, first: Mapping[str, Any], second: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        """Return both changes together, and why no device of this machine can run them."""
        together = {**first, **second}
        if "custom_options" in together:
            config, switched = self.config, dict[str, bool]()
            for change in (first, second):
                switched |= own_changes(config, change.get("custom_options", config.custom_options))
            together["custom_options"] = own_with(config, switched)
        for name, value in second.items():
            if name != "custom_options" and name in first and first[name] != value:
                return together, f"{name} is {first[name]} in the combination already"
        try:
            problem = next(iter(validate(changed(self.config, together), self.devices)), None)
        except ConfigError as error:
            problem = error.problem
        return together, None if problem is None else f"{problem.field}: {problem.reason}"

    def compiles(self, changes: Mapping[str, Any]) -> bool:
        return bool(changes.get("compile_mode", CompileMode.NONE) != CompileMode.NONE)

    def scaling(self, changes: Mapping[str, Any], verdict: Mapping[str, Any]) -> dict[str, Any]:
        """Return `scaling` and the extended `text` of a variant with another number of devices.

        The speed-up is the ratio of the total samples/s, the efficiency that ratio per device. Both
        have the interval of the verdict. Empty for other variants.
        """
        if not {"strategy", "devices_per_node"} & changes.keys():
            return {}
        count = _devices(changed(self.config, changes))
        ends = [verdict["effect"], verdict["low"], verdict["high"]]
        if any(end is None for end in ends):
            return {"scaling": {"devices": count, "speed_up": None, "efficiency": None}}
        speed, low, high = (1 + end for end in ends)
        devices = count / _devices(self.config)
        scaling: dict[str, float] = {"devices": count}
        for suffix, end in (("", speed), ("_low", low), ("_high", high)):
            scaling[f"speed_up{suffix}"], scaling[f"efficiency{suffix}"] = end, end / devices
        words = (
            f"{speed:.2f} times as fast [{low:.2f}, {high:.2f}], efficiency "
            f"{100 * speed / devices:.0f}% [{100 * low / devices:.0f}, {100 * high / devices:.0f}]"
        )
        return {"scaling": scaling, "text": f"{verdict['text']}; {words}"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkloadPlan:
        """Return the plan of plan.json; missing values get their defaults.

        Raises ConfigError for a value out of its bounds; KeyError, TypeError and ValueError for
        another file.
        """
        return cls(
            config=RunConfig.from_dict(values["config"]),
            arms=tuple(variant_from_dict(arm) for arm in values["arms"]),
            **numbers_of(values),
        )


def with_devices(plan: WorkloadPlan, devices: Sequence[TrainDevice]) -> WorkloadPlan:
    """Return the plan for these devices, with its variants validated on them."""
    arms = (
        make_variant(arm.changes, plan.config, devices, name=arm.name) if arm.changes else arm
        for arm in plan.arms
    )
    return replace(plan, arms=tuple(arms), devices=tuple(devices))


def _devices(config: RunConfig) -> int:
    return 1 if config.strategy is Strategy.NONE else config.devices_per_node * config.num_nodes
