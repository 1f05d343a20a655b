"""`python -m trainer.memory_estimate`: predict the peak memory of a run, and whether it fits."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from stepscope.common.config_issue import ConfigError
from stepscope.common.formatting import format_bytes, three_digits
from stepscope.host.process_limits import call_at_end_of, kill_group
from stepscope.lab.command import UsageError, print_error
from trainer.config import SETTINGS, RunConfig
from trainer.config_validation import TrainDevice, validate
from trainer.custom_workload import UserWorkloadError, choose, user_problem
from trainer.datasets import data_problem
from trainer.lab.options import add_settings, configured, is_file, settings_of, value_of
from trainer.memory_estimate import ABSENT, ABSENT_GPU

EXAMPLES = """\
examples:
  stepscope measure-memory --workload gpt --batch-size 64 --precision bf16 --json
  stepscope measure-memory --workload resnet --batch-size 256 --activation-checkpointing
  stepscope measure-memory --workload gpt --width 1024 --num-layers 24 --device cuda
      (also without a GPU)
  stepscope measure-memory --config runs/NAME/run.json --batch-size 128
  stepscope measure-memory --workload digits_cnn --find-batch-size --measure-throughput

Each setting of a run is an option: --optimizer adamw, --num-workers 4. Exit codes:
0 it fits, or this is unknown; 1 it does not fit, or the prediction failed; 2 wrong usage; 130
stopped.
"""
MAX_CONFIG_BYTES = 2**20
FITS, DOES_NOT, USAGE, STOPPED = 0, 1, 2, 130
_OWN = ("workload", "device", "precision", "batch_size")


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
    help_ = "also predict other batch sizes, up to the limit"
    add("--find-batch-size", action="store_true", help=help_)
    help_ = "with --find-batch-size: recommend a size, by short runs"
    add("--measure-throughput", action="store_true", help=help_)
    add("--json", action="store_true", help="print one JSON object")
    for field in {*SETTINGS} - {*_OWN}:
        is_switch = isinstance(getattr(RunConfig(), field), bool)
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch else {}
        name = f"--{field.replace('_', '-')}"
        add(name, metavar="VALUE", dest=f"field_{field}", help=argparse.SUPPRESS, **switch)
    return found


def config_of(options: argparse.Namespace, devices: Sequence[TrainDevice]) -> RunConfig:
    """Return the configuration of options and settings file. Raises UsageError and ConfigError."""
    fields = {field: getattr(options, f"field_{field}", None) for field in SETTINGS}
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except (UsageError, ConfigError, UserWorkloadError) as error:
        print_error(str(error))
        return USAGE
    except OSError as error:
        print_error(f"A file or folder cannot be used: {error}.")
        return DOES_NOT
    except KeyboardInterrupt:
        return STOPPED


def _run(options: argparse.Namespace) -> int:
    if options.measure_throughput and not options.find_batch_size:
        raise UsageError("--measure-throughput: needs --find-batch-size.")
    if is_file(options.workload):
        choose(options.workload)
    list_devices, estimate = _load()
    devices = list_devices()
    config = config_of(options, devices)
    device = device_of(config, devices)
    try:
        found = estimate.answer(
            config,
            device,
            largest=options.find_batch_size,
            probe=options.measure_throughput,
            progress=lambda text, share: _show(f"{text}…"),
        )
    except estimate.RunFailedError as error:
        _show("")
        print_error(str(error))
        return DOES_NOT
    finally:
        _show("")
    print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found)))
    return DOES_NOT if found["fits"] is False else FITS


def _load() -> tuple[Any, Any]:
    """Import `list_devices` and the estimator: torch takes seconds, in which Ctrl-C must work."""
    load = importlib.import_module
    return load("trainer.devices").list_devices, load("trainer.memory_estimate.estimate")


def answer_job() -> None:
    """Print the estimate of a job, a line of JSON on stdin, for the page; end with stdin.

    Each line is a JSON object: `progress` and `share`, then `answer`, or the `reason` of a failure.
    """
    # Output of torch or a workload must not mix with the lines.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=out, flush=True)

    job = json.loads(sys.stdin.readline())
    call_at_end_of(0, kill_group)
    write({"progress": "Loading PyTorch", "share": 0.02})
    list_devices, estimate = _load()
    try:
        config = RunConfig.from_dict(job["config"])
        found = estimate.answer(
            config,
            device_of(config, list_devices()),
            largest=bool(job["largest"]),
            probe=bool(job["probe"]),
            progress=lambda text, share: write({"progress": text, "share": share}),
        )
    except (ConfigError, estimate.RunFailedError) as error:
        write({"reason": str(error)})
    except (OSError, MemoryError, RuntimeError) as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        write({"reason": f"The prediction failed: {first[:300]}"})
    else:
        write({"answer": found})


def device_of(config: RunConfig, devices: Sequence[TrainDevice]) -> TrainDevice:
    """Return the device of a configuration. Raises ConfigError for an invalid configuration."""
    known, checked = list(devices), config
    if config.device == ABSENT:  # the number of absent GPUs is not limited
        known, checked = [*devices, ABSENT_GPU], replace(config, devices_per_node=1)
    refused = next(iter(validate(checked, known)), None) or data_problem(config)
    if (refused := refused or user_problem(config)) is not None:
        raise ConfigError(refused)
    return next(device for device in known if device.id == config.device)


def _lines(found: Mapping[str, Any]) -> list[str]:
    word = {True: "It fits.", False: "It does not fit.", None: "Unknown."}[found["fits"]]
    peak = format_bytes(found["predicted_peak_bytes"])
    lines = [f"{word} {found['reason']}", "", f"Predicted peak on {found['device_name']}: {peak}"]
    for name, size in found["parts"].items():
        if size:
            lines.append(f"  {name.replace('_', ' '):<18} {format_bytes(size):>10}")
    if found["predicted_reserved_bytes"] is not None:
        lines.append(f"Reserved by torch: {format_bytes(found['predicted_reserved_bytes'])}")
    for name, size in found["outside"].items():
        lines.append(f"In addition: {name.replace('_', ' ')} {format_bytes(size)}")
    lines.append(f"Safety margin: {100 * (found['margin']['factor'] - 1):.0f}%")
    lines += found["notes"]
    if "largest" not in found:
        return lines
    curve = found["largest"]
    lines += ["", f"{'batch':>8} {'peak':>10} {'needs':>10} {'samples/s':>11}"]
    for point in curve["points"]:
        rate = point["samples_per_sec"]
        lines.append(
            f"{point['batch_size']:>8,} {format_bytes(point['predicted_peak_bytes']):>10} "
            f"{format_bytes(point['needed_bytes']):>10} "
            f"{'' if rate is None else three_digits(rate):>11}"
        )
    return [*lines, curve["why"], *curve["not_measured"]]


def _show(progress: str) -> None:
    """Print progress over the former progress."""
    if sys.stderr.isatty():
        print(f"\r\033[K{progress}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--job"]:
        answer_job()
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sys.exit(main())
