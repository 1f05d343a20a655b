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
    issue,
)
from trainer.training.config_validation import TrainDevice, validate

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
    return [
        make_variant({field: value}, config, devices)
        for field in (*LAB_SETTINGS, "batch_size", "num_threads", "device")
        if field not in NOT_TIMED
        for value in suggested(field, config, devices)
    ]


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
    numbers: dict[str, Sequence[float]] = {
        "num_workers": sorted({0, 2, min(8, max(2, cores))}),
        # A GPU run uses the host's threads very little.
        "num_threads": (1, cores) if config.device == "cpu" else (),
        "batch_size": (2 * config.batch_size,),
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
        problem = next(iter(validate(changed(config, whole), devices)), None)
    except ConfigError as error:
        problem = error.problem
    problem = problem or speed_problem(str(whole.get("device", "")))
    shown = {field: value for field, value in whole.items() if field != "runner"}
    label = ", ".join(f"{field} {_words(value)}" for field, value in shown.items())
    return Variant(name=name or variant_name(changes), label=label, changes=whole, problem=problem)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the baseline with a variant's changes. Raises ConfigError, TypeError if unknown."""
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
        is_job = changes["strategy"] in (Strategy.DDP, Strategy.FSDP)
        needed["runner"] = Runner.TORCHRUN if is_job else Runner.THREAD
    # The number of samples per step stays: accumulation saves memory.
    parts = changes.get("gradient_accumulation_steps", 1)
    samples = config.batch_size * config.gradient_accumulation_steps
    if parts > 1 and samples % parts == 0:
        needed["batch_size"] = samples // parts
    return {
        field: value
        for field, value in needed.items()
        if field not in changes and getattr(config, field) != value
    }


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

    def subject(self) -> dict[str, Any]:
        return {"config": self.config.to_dict()}

    def combine(
        self, first: Mapping[str, Any], second: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str | None]:
        """Return both changes together, and why no device of this machine can run them."""
        together, refused = SweepPlan.combine(self, first, second)
        if refused is not None:
            return together, refused
        problem = next(iter(validate(changed(self.config, together), self.devices)), None)
        return together, None if problem is None else f"{problem.field}: {problem.reason}"

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], devices: Sequence[TrainDevice] = ()
    ) -> WorkloadPlan:
        """Return the plan of plan.json. Raises ConfigError, KeyError, TypeError and ValueError."""
        return cls(
            config=RunConfig.from_dict(values["config"]),
            variants=msgspec.convert(values["variants"], tuple[Variant, ...]),
            devices=devices,
            **numbers_of(values),
        )
