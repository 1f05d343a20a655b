"""The command line of a sweep: its options, and their plan."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepscope.common.config_issue import ConfigError
from stepscope.lab.command import UsageError, add_numbers, numbers
from stepscope.lab.plan import Variant
from trainer.config import SETTINGS, RunConfig, Workload, check_setting, defaults
from trainer.lab.plan import (
    FIXED,
    WorkloadPlan,
    all_variants,
    make_variant,
    suggested,
)
from trainer.lab.presets import PRESETS
from trainer.training.config_validation import TrainDevice, validate

EXAMPLES = """\
examples:
  stepscope lab --workload digits_cnn --variants channels_last=false,precision=bf16
  stepscope lab --workload digits_cnn --preset tutorials --max-rounds 8
  stepscope lab --workload digits_mlp --variants num_workers=2+prefetch_factor=4
  stepscope lab --folder runs/lab/NAME        resumes a stopped sweep
  stepscope lab --variant tf32 train.py       a script of your own: its options (--variant, --gate,
                                              --link, …) precede the script; see docs/lab.md

A variant turns a setting on (pin_memory), sets a value (channels_last=false, precision=bf16), or
changes several settings (num_workers=2+prefetch_factor=4). A number or choice without a value, such
as precision, means every useful value. --set changes the baseline.
Exit codes: 0 the sweep is finished, 1 it failed, 2 wrong usage, 130 it was stopped.
"""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="stepscope lab",
        description="Measure which settings make training faster on this machine. Each trial is a "
        "fresh process; a round has a trial of each variant and the baseline, in random order. "
        "--device, --precision, --batch-size and --set are settings of the baseline.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add_settings(found)
    help_ = "settings to compare (default: all supported ones)"
    add("--variants", metavar="A,B=1,…", help=help_)
    add("--preset", choices=sorted(PRESETS), help="a ready-made baseline and settings")
    add_numbers(found)
    add("--list", action="store_true", help="list the settings for this baseline and exit")
    return found


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of a configuration, of which `configured` reads the values."""
    add = parser.add_argument
    built_in = ", ".join(one for one in Workload if one is not Workload.CUSTOM)
    help_ = f"path.py:build for a custom workload, or one of {built_in}"
    add("--workload", metavar="W", help=help_)
    add("--device", metavar="D", help="cpu, cuda (the largest GPU) or a GPU's UUID")
    add("--precision", metavar="P", help="fp32, tf32, bf16, fp16, pure_bf16 or pure_fp16")
    add("--batch-size", metavar="N", help="samples per batch")
    add("--set", metavar="FIELD=VALUE", action="append", default=[], help="another setting")


PLANNING = (
    *("workload", "variants", "preset", "device", "precision", "batch_size", "set"),
    *("steps", "warmup", "max_rounds", "no_combination"),
)
"""Options that a resumed sweep takes from its plan."""


def plan_of(options: argparse.Namespace, devices: Sequence[TrainDevice]) -> WorkloadPlan:
    """Return the plan of the options. Raises UsageError and ConfigError."""
    config = configured(options, devices)
    if options.preset:
        if options.variants:
            raise UsageError("--preset: has its own variants. Remove --variants or --preset.")
        config, found = PRESETS[options.preset].build(config, devices)
    elif options.variants:
        found = _variants(options.variants, config, devices)
    else:
        found = [one for one in all_variants(config, devices) if one.problem is None]
    refused = validate(config, devices)
    if refused:
        raise ConfigError(refused[0])
    return WorkloadPlan(
        config=config,
        variants=tuple(found),
        devices=tuple(devices),
        seed=config.seed % 10**9,
        **numbers(options),
    )


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the baseline fields that the options set, as texts. Raises UsageError."""
    given: dict[str, str] = {}
    for text in options.set:
        field, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set: must be FIELD=VALUE, got {text!r}. Give a value.")
        given[_known(field, "--set")] = value
    for field in ("precision", "batch_size"):
        if getattr(options, field) is not None:
            given[field] = getattr(options, field)
    return given


def configured(options: argparse.Namespace, devices: Sequence[TrainDevice]) -> RunConfig:
    """Return the baseline of the options. Raises UsageError and ConfigError."""
    named = Workload.CUSTOM if is_file(options.workload) else options.workload
    if named not in list(Workload):
        known = f"path.py:build or one of {', '.join(Workload)}"
        raise UsageError(f"--workload: must be {known}, got {named!r:.60}.")
    config = defaults(Workload(named), find_device(options.device, devices))
    changes = {
        field: check_setting(field, text, from_text=True)
        for field, text in settings_of(options).items()
    }
    return replace(config, **changes)


def find_device(asked: str | None, devices: Sequence[TrainDevice]) -> str:
    if asked not in (None, "cuda"):
        return asked
    for device in devices:
        if device.reason is None and (asked is None or device.cuda_index is not None):
            return device.id
    if asked is None:
        return "cpu"
    raise UsageError("--device: torch finds no usable GPU here. Give --device cpu.")


def is_file(workload: str | None) -> bool:
    """Return True if `--workload` names a file with a custom workload."""
    return workload is not None and ".py" in workload


def _known(field: str, option: str) -> str:
    """Return the name of a field. Raises UsageError, which names like ones."""
    if field in SETTINGS:
        return field
    near = difflib.get_close_matches(field, SETTINGS, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(SETTINGS)}."
    raise UsageError(f"{option}: {field[:60]!r} is no setting. {hint}")


def _variants(text: str, config: RunConfig, devices: Sequence[TrainDevice]) -> list[Variant]:
    """Return the variants of `--variants`. Raises UsageError for one that equals the baseline."""
    found: dict[str, Variant] = {}
    for token in filter(None, map(str.strip, text.split(","))):
        changes = _changes(token, config, devices)
        for change in changes:
            name = token if len(changes) == 1 else None
            variant = make_variant(change, config, devices, name=name)
            is_equal = all(getattr(config, field) == value for field, value in change.items())
            if is_equal and variant.problem is None:
                raise UsageError(
                    f"--variants: {token} equals the baseline. Remove it, or change the baseline "
                    "with --set."
                )
            found.setdefault(variant.name, variant)
    return list(found.values())


def _changes(token: str, config: RunConfig, devices: Sequence[TrainDevice]) -> list[dict[str, Any]]:
    """Return a variant's changes, several for a field without a value. Raises UsageError."""
    parts = re.split(r"\+(?=[a-z_])", token)
    change: dict[str, Any] = {}
    for part in parts:
        field, equals, text = part.partition("=")
        if _known(field, "--variants") in FIXED:
            raise UsageError(f"--variants: {field} must be the same for all. Set it with --set.")
        if field in change:
            raise UsageError(f"--variants: {token!r} has {field} twice. Remove one of them.")
        if equals:
            try:
                change[field] = check_setting(field, text, from_text=True)
            except ConfigError as error:
                raise UsageError(f"--variants: {error}") from error
        elif isinstance(getattr(config, field), bool):
            change[field] = True
        elif len(parts) > 1:
            raise UsageError(f"--variants: {field} in {token!r} has no value. Give {field}=….")
        elif values := list(suggested(field, config, devices)):
            return [{field: value} for value in values]
        else:
            raise UsageError(f"--variants: {field} has no value to suggest. Give {field}=….")
    return [change]
