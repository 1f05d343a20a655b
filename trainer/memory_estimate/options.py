"""The command line of a memory estimate: each setting of a run is an option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from stepscope.lab.command import UsageError
from stepscope.run.setting_names import EARLIER_FIELDS, EARLIER_IMPLS
from trainer.config import FIELDS, RunConfig
from trainer.config_validation import TrainDevice
from trainer.lab.options import add_settings, configured, settings_of, value_of

EXAMPLES = """\
examples:
  stepscope measure-memory --workload gpt --batch-size 64 --precision bf16 --json
  stepscope measure-memory --workload resnet --batch-size 256 --activation-checkpointing
  stepscope measure-memory --workload gpt --width 1024 --layers 24 --device cuda
      (also without a GPU)
  stepscope measure-memory --config runs/NAME/run.json --batch-size 128
  stepscope measure-memory --workload digits_cnn --find-batch-size --measure-throughput

Each setting of a run is an option: --optimizer adamw, --num-workers 4. Exit codes:
0 it fits, or this is unknown; 1 it does not fit, or the prediction failed; 2 wrong usage; 130
stopped.
"""
ABSENT = "GPU-absent"  # The device of `--device cuda` on a machine without a usable GPU.
ABSENT_GPU = TrainDevice(
    id=ABSENT,
    name="a CUDA GPU that is not in this machine",
    memory_total=0,
    cuda_index=0,
    compute_capability=(9, 0),
)
MAX_CONFIG_BYTES = 2**20
_OWN = ("workload", "device", "precision", "batch_size")
_EARLIER = {field: (name,) for name, field in EARLIER_FIELDS.items()}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="stepscope measure-memory",
        description="Predict a run's peak memory without running it or needing a GPU, and "
        "compare it with free device memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add_settings(found)
    add("--config", metavar="FILE", help="settings as JSON, or a run.json; - is standard input")
    help_ = "also predict other batch sizes, up to the limit (old name: --largest)"
    add("--find-batch-size", "--largest", action="store_true", help=help_)
    help_ = "with --find-batch-size: recommend a size, by short runs (old name: --probe)"
    add("--measure-throughput", "--probe", action="store_true", help=help_)
    add("--runs", help=argparse.SUPPRESS)  # of earlier versions; has no effect
    add("--json", action="store_true", help="print one JSON object")
    for field in {*FIELDS, *EARLIER_IMPLS} - {*_OWN}:
        is_switch = isinstance(getattr(RunConfig(), field), bool)
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch else {}
        names = [f"--{name.replace('_', '-')}" for name in (field, *_EARLIER.get(field, ()))]
        add(*names, metavar="VALUE", dest=f"field_{field}", help=argparse.SUPPRESS, **switch)
    return found


def config_of(options: argparse.Namespace, devices: Sequence[TrainDevice]) -> RunConfig:
    """Return the configuration: options override a file. Raises UsageError and ConfigError."""
    fields = {
        field: getattr(options, f"field_{field}", None) for field in (*FIELDS, *EARLIER_IMPLS)
    }
    given = [f"{field}={text}" for field, text in fields.items() if text is not None]
    options = argparse.Namespace(**{**vars(options), "set": [*given, *options.set]})
    if options.device == "cuda":
        usable = [one.id for one in devices if one.cuda_index is not None and not one.reason]
        options.device = (usable or [ABSENT])[0]
    if options.config is None:
        return configured(options, devices)
    config = RunConfig.from_dict(_read_settings(options.config))
    if options.workload is not None:
        raise UsageError("--config: has a workload, got --workload as well. Omit one of them.")
    changes = {field: value_of(field, text) for field, text in settings_of(options).items()}
    if options.device is not None:
        changes["device"] = options.device
    return replace(config, **changes)


def _read_settings(name: str) -> dict[str, Any]:
    """Return the settings in an untrusted JSON file, which may be a whole run.json."""
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file name"
        raise UsageError(f"--config: {name[:200]!r} cannot be read ({reason}).") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise UsageError(f"--config: limited to {MAX_CONFIG_BYTES:,} bytes. Choose a run.json.")
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        reason = str(error)[:100]
        raise UsageError(
            f"--config: must be a JSON object ({reason}). Choose a run.json."
        ) from None
    config = found.get("config")
    found = config if isinstance(config, dict) else found
    if "workload" not in found:
        raise UsageError("--config: must be an object with a workload. Choose a run.json.")
    return found
