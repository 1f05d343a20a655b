"""The command line of a prediction: every setting of a run is an option, and the configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import FIELDS, ConfigError, Problem, RunConfig, Workload
from trainer.config_validation import TrainDevice
from trainer.lab.options import UsageError, configured, value_of

EXAMPLES = """\
examples:
  python -m trainer.memory_estimate --workload gpt --batch-size 64 --precision bf16 --json
  python -m trainer.memory_estimate --workload resnet --batch-size 256 --activation-checkpointing
  python -m trainer.memory_estimate --workload gpt --width 1024 --layers 24 --device cuda
      (also without a GPU)
  python -m trainer.memory_estimate --config runs/NAME/run.json --batch-size 128
  python -m trainer.memory_estimate --workload digits_cnn --largest --probe

Each setting of a run is an option: --optimizer adamw, --accumulation 4, --fused false. Exit codes:
0 it fits, or this cannot be said; 1 it does not fit, or the prediction failed; 2 wrong usage; 130
it was stopped.
"""
ABSENT = "GPU-absent"
"""The device of `--device cuda` on a machine without a usable GPU."""
ABSENT_GPU = TrainDevice(
    id=ABSENT,
    name="a CUDA GPU that is not in this machine",
    memory_total=0,
    cuda_index=0,
    compute_capability=(9, 0),
)
CONFIG_LIMIT = 2**20
"""Bytes of a file of settings: a run.json has some thousand."""
_OWN = ("workload", "device", "precision", "batch_size")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m trainer.memory_estimate`."""
    found = argparse.ArgumentParser(
        prog="python -m trainer.memory_estimate",
        description="Predict a run's peak memory without running it or needing a GPU, and "
        "compare it with free device memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    built_in = ", ".join(one for one in Workload if one is not Workload.USER)
    add("--workload", metavar="W", help=f"path.py:build of your own, or one of {built_in}")
    add("--device", metavar="D", help="cpu, cuda (the largest GPU) or a GPU's UUID")
    add("--precision", metavar="P", help="fp32, tf32, bf16, fp16, pure_bf16 or pure_fp16")
    add("--batch-size", metavar="N", help="samples in a batch")
    add("--config", metavar="FILE", help="settings as JSON, or a run.json; - is standard input")
    add("--set", metavar="FIELD=VALUE", action="append", default=[], help="a setting")
    add(
        "--largest",
        action="store_true",
        help="also predict other batch sizes, up to the largest that fits",
    )
    add("--probe", action="store_true", help="with --largest: measure throughput in short runs")
    add("--runs", metavar="DIR", type=Path, help="folder of all runs (STEPSCOPE_RUNS, or runs/)")
    add("--json", action="store_true", help="print one JSON object")
    group = found.add_argument_group("settings of a run")
    for field in FIELDS:
        if field not in _OWN:
            option = f"--{field.replace('_', '-')}"
            value = getattr(RunConfig(), field)
            is_switch = isinstance(value, bool)
            group.add_argument(
                option,
                metavar="VALUE",
                dest=f"field_{field}",
                nargs="?" if is_switch else None,
                const="true" if is_switch else None,
                help=argparse.SUPPRESS,
            )
    return found


def config_of(options: argparse.Namespace, devices: Sequence[TrainDevice]) -> RunConfig:
    """Return the configuration that the options describe. Raises UsageError and ConfigError.

    What is given on the command line counts more than a file of settings.
    """
    given = [
        f"{field}={text}"
        for field in FIELDS
        if (text := getattr(options, f"field_{field}", None)) is not None
    ]
    if options.config is None:
        asked = argparse.Namespace(**vars(options))
        asked.set = [*given, *options.set]
        if asked.device is not None:
            asked.device = device_id(asked.device, devices)
        return configured(asked, devices)
    values = _settings(options.config)
    config = RunConfig.from_dict(values)
    named = [
        f"{name}={text}" for name in ("precision", "batch_size") if (text := getattr(options, name))
    ]
    if options.workload is not None:
        raise UsageError("--config: has a workload, got --workload as well. Leave one out.")
    changes: dict[str, Any] = {}
    for text in (*named, *given, *options.set):
        field, equals, value = text.partition("=")
        if not equals or field not in FIELDS:
            raise UsageError(f"--set: must be FIELD=VALUE with a setting, got {text[:60]!r}.")
        changes[field] = value_of(field, value)
    if options.device is not None:
        changes["device"] = device_id(options.device, devices)
    return RunConfig(**{**{name: getattr(config, name) for name in FIELDS}, **changes})


def device_id(asked: str, devices: Sequence[TrainDevice]) -> str:
    """Return the id of a device: `cuda` is the largest GPU, or one that is not there."""
    if asked != "cuda":
        return asked
    gpus = [device.id for device in devices if device.cuda_index is not None and not device.reason]
    return gpus[0] if gpus else ABSENT


def _settings(name: str) -> dict[str, Any]:
    """Read a file of settings, which may be a whole run.json; it is not trusted."""
    try:
        if name == "-":
            text = sys.stdin.read(CONFIG_LIMIT + 1)
        else:
            with Path(name).open("rb") as file:
                text = file.read(CONFIG_LIMIT + 1).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--config: {name[:200]!r} cannot be read ({reason}).") from None
    if len(text) > CONFIG_LIMIT:
        raise UsageError(f"--config: must be at most {CONFIG_LIMIT:,} bytes. Give a run.json.")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config: must be JSON ({str(error)[:100]}). Give a run.json.") from None
    if isinstance(found, dict) and isinstance(found.get("config"), dict):
        found = found["config"]
    if not isinstance(found, dict) or "workload" not in found:
        raise ConfigError(
            Problem("config", "must be an object with a workload", "Give a run.json, or --workload")
        )
    return found
