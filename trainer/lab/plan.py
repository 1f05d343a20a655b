"""The plan of a sweep over a workload, and its variants. No torch import.

The name of a variant is its text in `--variants`: `pin_memory` turns a setting on,
`channels_last=false` sets a value, and `num_workers=2+prefetch_factor=4` changes two settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from stepscope.common.config_issue import ConfigError, ConfigIssue
from stepscope.gpu.source import is_simulated
from stepscope.host.environment import granted_cores
from stepscope.lab.plan import SweepPlan, Variant, numbers_of
from trainer.config import (
    SETTINGS,
    RunConfig,
    Runner,
    Strategy,
    Workload,
    issue,
    limits_of,
)
from trainer.config_validation import TrainDevice, validate
from trainer.custom_workload import user_workload_settings

FIXED = frozenset(
    ("workload", "epochs", "seed", "max_steps", "resume_from", "runner", "nan_policy")
    + ("lr_scheduler", "lr_warmup_steps")
)
"""Fields that the sweep sets, or that change what is trained rather than how fast."""

LAB_SETTINGS = tuple(name for name, about in SETTINGS.items() if about.in_lab)

NOT_TIMED = frozenset({"kernel_warmup", "preallocate_memory"})
"""Switches of the first steps only, which no trial counts."""


def all_variants(config: RunConfig, devices: Sequence[TrainDevice]) -> list[Variant]:
    """Return every useful variant of a baseline, unsupported ones with their `problem`."""
    custom = []
    for name in own_settings(config):
        on = not config.has(name)
        changes = {"custom_options": own_with(config, {name: on})}
        text = name if on else f"{name}=false"
        custom.append(make_variant(changes, config, devices, name=text))
    return custom + [
        make_variant({field: value}, config, devices)
        for field in (*LAB_SETTINGS, "batch_size", "num_threads", "device")
        if field not in NOT_TIMED
        for value in suggested(field, config, devices)
    ]


def own_settings(config: RunConfig) -> Mapping[str, str]:
    """Return the names and descriptions of a custom workload's settings; empty if unreadable."""
    if config.workload is not Workload.CUSTOM:
        return {}
    try:
        return user_workload_settings()
    except ConfigError:
        return {}


def own_with(config: RunConfig, switched: Mapping[str, bool]) -> str:
    """Return the baseline's `custom_options` with these settings turned on or off."""
    names = [name for name in config.custom_options.split(",") if name and switched.get(name, True)]
    added = [name for name, on in switched.items() if on and name not in names]
    return ",".join([*names, *added])


def own_changes(config: RunConfig, options: str) -> dict[str, bool]:
    """Return which settings `options`, a value of `custom_options`, turns on or off."""
    before, after = (
        set(filter(None, text.split(","))) for text in (config.custom_options, options)
    )
    return {name: name in after for name in sorted(before ^ after)}


def suggested(field: str, config: RunConfig, devices: Sequence[TrainDevice]) -> Iterator[Any]:
    """Yield the values of a field that are worth comparing with the baseline's value."""
    now = getattr(config, field)
    if field in ("prefetch_factor", "persistent_workers") and config.num_workers == 0:
        return
    if isinstance(now, bool):
        yield not now
    elif field in ("precision", "compile_mode", "optimizer_impl"):
        yield from (str(value) for value in type(now) if value != now)
    elif field == "device":
        yield from (device.id for device in devices if device.id != now and device.reason is None)
    else:
        yield from (value for value in _numbers(field, config) if value != now)


def _numbers(field: str, config: RunConfig) -> Sequence[float]:
    cores = granted_cores()
    double = 2 * config.batch_size
    # A GPU run uses the host's threads very little. 0 threads are half of the cores.
    threads = {1, cores} - {config.num_threads or max(1, cores // 2)}
    numbers: dict[str, Sequence[float]] = {
        "num_workers": sorted({0, 2, min(8, max(2, cores))}),
        "num_threads": sorted(threads) if config.device == "cpu" else (),
        "batch_size": [double] if double <= limits_of("batch_size")[1] else (),
        "prefetch_factor": (4,),
        "gradient_accumulation_steps": (4,),
        "max_grad_norm": (1.0,),
    }
    return numbers.get(field, ())


def speed_problem(device: str) -> ConfigIssue | None:
    """Return why the speed of a device is not measured; None if it is."""
    if not is_simulated(device):
        return None
    reason = "the GPU is simulated, and its times are not those of a GPU"
    return issue("device", reason, "Choose the CPU, or measure on a machine with a GPU")


def make_variant(
    changes: Mapping[str, Any],
    config: RunConfig,
    devices: Sequence[TrainDevice],
    *,
    name: str | None = None,
) -> Variant:
    """Return the variant with these changes and the changes that they require."""
    whole = {**changes, **_companions(changes, config)}
    problem = None
    try:
        found = validate(changed(config, whole), devices)
        # Problems of the variant's fields first: others follow from them or from the baseline.
        problem = next((one for one in found if one.field in changes), next(iter(found), None))
    except ConfigError as error:
        problem = error.problem
    problem = problem or speed_problem(str(whole.get("device", "")))
    samples = config.batch_size * config.gradient_accumulation_steps
    parts = changes.get("gradient_accumulation_steps", 1)
    if problem is None and "batch_size" not in changes and samples % parts:
        reason = f"{samples} samples per step are not divisible by {parts}"
        problem = issue("gradient_accumulation_steps", reason, "Give a batch size too")
    shown = (item for item in whole.items() if item[0] != "runner")  # follows from the strategy
    label = ", ".join(_label(field, value, config) for field, value in shown)
    return Variant(name=name or variant_name(changes), label=label, changes=whole, problem=problem)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the baseline with a variant's changes. Raises ConfigError."""
    unknown = next((field for field in changes if field not in SETTINGS), None)
    if unknown is not None:
        raise ConfigError(
            ConfigIssue(unknown, "is no setting", "Choose one of the sidebar's settings")
        )
    return replace(config, **changes)


def variant_name(changes: Mapping[str, Any]) -> str:
    """Return the name of a variant, as `--variants` takes it.

    >>> variant_name({"pin_memory": True, "channels_last": False, "num_workers": 2})
    'pin_memory+channels_last=false+num_workers=2'
    """
    return "+".join(
        field if value is True else f"{field}={'false' if value is False else value}"
        for field, value in changes.items()
    )


_UNPINNED = {"non_blocking": False, "copy_stream": False}
GPU_OFF: dict[str, Any] = _UNPINNED | dict.fromkeys(
    ("pin_memory", "dataset_on_device", "cuda_graphs", "preallocate_memory"), False
)
"""Settings that a CPU does not support."""
_NEEDS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("non_blocking", True, {"pin_memory": True}),
    ("copy_stream", True, {"pin_memory": True, "non_blocking": True}),
    ("pin_memory", False, _UNPINNED),
    ("dataset_on_device", True, {"num_workers": 0, "copy_stream": False}),
    ("device", "cpu", GPU_OFF),
)
"""A field, a value, and the settings that this value requires."""


def _companions(changes: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the required settings that differ from the baseline and are not in `changes`."""
    needed: dict[str, Any] = {}
    for name, value, more in _NEEDS:
        if name in changes and changes[name] == value:
            needed |= more
    if "strategy" in changes:
        several = changes["strategy"] in (Strategy.DDP, Strategy.FSDP)
        needed["runner"] = Runner.TORCHRUN if several else Runner.THREAD
        fused_sgd = (config.optimizer, config.optimizer_impl) == ("sgd", "fused")
        if changes["strategy"] == Strategy.FSDP and fused_sgd:  # supports no sharded weights
            needed["optimizer_impl"] = "for-loop"
    # The number of samples per step stays: accumulation saves memory.
    parts = changes.get("gradient_accumulation_steps")
    samples = config.batch_size * config.gradient_accumulation_steps
    if isinstance(parts, int) and parts > 1 and samples % parts == 0:
        needed["batch_size"] = samples // parts
    return {
        field: value
        for field, value in needed.items()
        if field not in changes and getattr(config, field) != value
    }


def _label(field: str, value: Any, config: RunConfig) -> str:
    switched = own_changes(config, value) if field == "custom_options" else {field: value}
    return ", ".join(
        f"{name} {('off', 'on')[on] if isinstance(on, bool) else on}"
        for name, on in switched.items()
    )


@dataclass(frozen=True, kw_only=True)
class WorkloadPlan(SweepPlan):
    """A sweep over a workload on this machine's `devices`; `config` is the baseline."""

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkloadPlan:
        """Return the plan of plan.json. Raises ConfigError, KeyError, TypeError and ValueError."""
        return cls(
            config=RunConfig.from_dict(values["config"]),
            variants=msgspec.convert(values["variants"], tuple[Variant, ...]),
            **numbers_of(values),
        )


def with_devices(plan: WorkloadPlan, devices: Sequence[TrainDevice]) -> WorkloadPlan:
    """Return the plan for these devices, with its variants validated on them."""
    variants = (
        make_variant(variant.changes, plan.config, devices, name=variant.name)
        if variant.changes
        else variant
        for variant in plan.variants
    )
    return replace(plan, variants=tuple(variants), devices=tuple(devices))
