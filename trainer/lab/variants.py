"""What a sweep can compare: arms, each a change of some settings of the baseline. No torch import.

An arm's name is what `--arms` takes: `pin_memory` switches on, `channels_last=false` and
`precision=bf16` set a value, and `num_workers=2+prefetch_factor=4` changes two settings at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stepscope.run.setting_names import current_settings
from trainer.config import (
    FIELDS,
    LIMITS,
    CompileMode,
    ConfigError,
    ConfigIssue,
    RunConfig,
    Runner,
    Strategy,
    Workload,
)
from trainer.config_validation import TrainDevice, validate
from trainer.custom_workload import UserWorkloadError, user_workload_settings
from trainer.techniques import SWITCHES

FIXED = frozenset(
    ("workload", "epochs", "seed", "max_steps", "resume_from", "runner", "nan_policy")
    + ("lr_scheduler", "lr_warmup_steps")
)
"""Fields that the sweep sets itself, or that change what is trained rather than how fast."""

NOT_TIMED = frozenset({"kernel_warmup", "preallocate_memory"})
"""Switches of the first steps only, which no sample counts: `arms` does not offer them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Settings that differ from the baseline's, as JSON values; `problem` says why they cannot be.

    `changes` is empty for an arm that cannot even be described, such as a GPU that is not there.
    """

    name: str
    label: str
    changes: Mapping[str, Any]
    problem: ConfigIssue | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the arm as plan.json and sweep.json hold it."""
        problem = None if self.problem is None else asdict(self.problem)
        changes = dict(self.changes)
        return {"name": self.name, "label": self.label, "changes": changes, "problem": problem}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Variant:
        """The inverse of `to_dict`. Raises KeyError, TypeError and ValueError."""
        problem = values.get("problem")
        return cls(
            name=str(values["name"]),
            label=str(values["label"]),
            changes=current_settings(values["changes"]),
            problem=None if problem is None else ConfigIssue(**problem),
        )


def compiles(changes: Mapping[str, Any]) -> bool:
    """Return True if these changes switch torch.compile on."""
    return bool(changes.get("compile_mode", CompileMode.NONE) != CompileMode.NONE)


def arms(config: RunConfig, devices: Sequence[TrainDevice]) -> list[Variant]:
    """Return every arm that makes sense for this baseline, those that cannot be with `problem`.

    The settings that a workload of the user's own declares come first.
    """
    own = [_own_arm(name, config, devices) for name in own_settings(config)]
    return own + [
        make_arm({field: value}, config, devices)
        for field in (*(s.field for s in SWITCHES), "batch_size", "num_threads", "device")
        if field not in NOT_TIMED
        for value in suggested(field, config, devices)
    ]


def _own_arm(name: str, config: RunConfig, devices: Sequence[TrainDevice]) -> Variant:
    on = not config.has(name)
    changes = {"custom_options": own_with(config, {name: on})}
    return make_arm(changes, config, devices, name=name if on else f"{name}=false")


def own_settings(config: RunConfig) -> Mapping[str, str]:
    """Return the settings that the user's own workload declares, with what each does.

    Empty for other workloads, and for a file that cannot be read: `user_problem` says why.
    """
    if config.workload is not Workload.CUSTOM:
        return {}
    try:
        return user_workload_settings()
    except UserWorkloadError:
        return {}


def own_with(config: RunConfig, switched: Mapping[str, bool]) -> str:
    """Return the baseline's `own` with these settings switched on or off."""
    names = [name for name in config.custom_options.split(",") if name and switched.get(name, True)]
    added = [name for name, on in switched.items() if on and name not in names]
    return ",".join([*names, *added])


def suggested(field: str, config: RunConfig, devices: Sequence[TrainDevice]) -> Iterator[Any]:
    """Yield the values that are worth comparing with the baseline's value of this field."""
    now = getattr(config, field)
    if field == "persistent_workers" and config.num_workers == 0:
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
    cores = os.cpu_count() or 1
    if field == "num_workers":
        return sorted({0, 2, min(8, max(2, cores))})
    if field == "num_threads":
        # On a GPU the threads of the host compute next to nothing. 0 means half of the cores.
        used = config.num_threads or max(1, cores // 2)
        return sorted({1, cores} - {used}) if config.device == "cpu" else ()
    if field == "batch_size":
        return [2 * config.batch_size] if 2 * config.batch_size <= LIMITS[field][1] else ()
    others: dict[str, Sequence[float]] = {
        "prefetch_factor": (4,),
        "gradient_accumulation_steps": (4,),
        "max_grad_norm": (1.0,),
    }
    return others.get(field, ())


def make_arm(
    changes: Mapping[str, Any],
    config: RunConfig,
    devices: Sequence[TrainDevice],
    *,
    name: str | None = None,
) -> Variant:
    """Return the arm that makes these changes, and those others without which they cannot be."""
    whole = {**changes, **_companions(changes, config)}
    problem = None
    try:
        found = validate(changed(config, whole), devices)
        # The one of the arm's own fields first: the others follow from it, or from the baseline.
        problem = next((one for one in found if one.field in changes), next(iter(found), None))
    except ConfigError as error:
        problem = error.problem
    said = (item for item in whole.items() if item[0] != "runner")  # follows from parallel
    label = ", ".join(_said(field, value, config) for field, value in said)
    return Variant(name=name or arm_name(changes), label=label, changes=whole, problem=problem)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the baseline with an arm's changes. Raises ConfigError."""
    unknown = next((field for field in changes if field not in FIELDS), None)
    if unknown is not None:
        raise ConfigError(
            ConfigIssue(unknown, "is no setting", "Choose one of the sidebar's settings")
        )
    return replace(config, **changes)


def arm_name(changes: Mapping[str, Any]) -> str:
    """Return the name of an arm, as `--arms` takes it."""
    return "+".join(_token(field, value) for field, value in changes.items())


def _token(field: str, value: Any) -> str:
    if value is True:
        return field
    return f"{field}={'false' if value is False else value}"


_UNPINNED = {"non_blocking": False, "copy_stream": False}
_ON_CPU = dict.fromkeys(
    ("pin_memory", "dataset_on_device", "cuda_graphs", "preallocate_memory"), False
)
_NO_WORKERS = {"prefetch_factor": RunConfig().prefetch_factor, "persistent_workers": True}
_NEEDS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("non_blocking", True, {"pin_memory": True}),
    ("copy_stream", True, {"pin_memory": True, "non_blocking": True}),
    ("pin_memory", False, _UNPINNED),
    ("num_workers", 0, _NO_WORKERS),
    ("dataset_on_device", True, {**_NO_WORKERS, "num_workers": 0, "copy_stream": False}),
    ("device", "cpu", _UNPINNED | _ON_CPU),
)
"""A field, a value, and the settings that must change with it."""


def _companions(changes: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Settings that must change along; only those that differ and that the arm does not name."""
    needed: dict[str, Any] = {}
    for field, value, more in _NEEDS:
        if field in changes and changes[field] == value:
            needed |= more
    if "strategy" in changes:
        several = changes["strategy"] in (Strategy.DDP, Strategy.FSDP)
        needed["runner"] = Runner.TORCHRUN if several else Runner.THREAD
        fused_sgd = (config.optimizer, config.optimizer_impl) == ("sgd", "fused")
        if changes["strategy"] == Strategy.FSDP and fused_sgd:  # takes no weights that are spread
            needed["optimizer_impl"] = "for-loop"
    # A step of as many samples as before: what accumulation saves is memory.
    parts = changes.get("gradient_accumulation_steps")
    if isinstance(parts, int) and parts > 1:
        samples = config.batch_size * config.gradient_accumulation_steps
        if samples % parts == 0:
            needed["batch_size"] = samples // parts
    return {
        field: value
        for field, value in needed.items()
        if field not in changes and getattr(config, field) != value
    }


def own_changes(config: RunConfig, own: str) -> dict[str, bool]:
    """Return which of the user's own settings `own` switches on or off in the baseline."""
    before, after = (set(filter(None, text.split(","))) for text in (config.custom_options, own))
    return {name: name in after for name in sorted(before ^ after)}


def _said(field: str, value: Any, config: RunConfig) -> str:
    if field == "custom_options":
        switched = own_changes(config, value)
        return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in switched.items())
    if isinstance(value, bool):
        return f"{field} {'on' if value else 'off'}"
    return f"{field} {value}"
