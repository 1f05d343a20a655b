"""`python -m trainer.memory_estimate`: measure the peak memory of a workload in three steps."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stepscope.common.config_issue import ConfigError
from stepscope.common.formatting import format_bytes, three_digits
from stepscope.host.process_limits import call_at_end_of, kill_group
from stepscope.lab.command import UsageError, print_error
from stepscope.store import StoreError
from trainer.config import SETTINGS, RunConfig
from trainer.config_validation import TrainDevice, validate
from trainer.custom_workload import choose, user_problem
from trainer.datasets import data_problem
from trainer.lab.options import (
    add_settings,
    configured,
    find_device,
    is_file,
    settings_of,
    value_of,
)
from trainer.memory_estimate import ProbeError, probe_problem
from trainer.memory_estimate.batch_size import find_batch_sizes
from trainer.runners.child_process import MemoryProbeRun

EXAMPLES = """\
examples:
  stepscope measure-memory --workload gpt --batch-size 64 --precision bf16 --json
  stepscope measure-memory --workload resnet --batch-size 256 --activation-checkpointing
  stepscope measure-memory --config runs/NAME/run.json --batch-size 128
  stepscope measure-memory --workload digits_cnn --find-batch-size

Each setting of a run is an option: --optimizer adamw, --num-workers 4. Exit codes: 0 it fits;
1 it does not fit, or the measurement failed; 2 wrong usage; 130 stopped.
"""
MAX_CONFIG_BYTES = 2**20
RATE_SECONDS = 1.0  # Time that each probe of the search trains for, after its first step.
FITS, DOES_NOT, USAGE, STOPPED = 0, 1, 2, 130
_OWN_OPTIONS = ("workload", "device", "precision", "batch_size")

Progress = Callable[[str, float], None]  # Called with the current activity and the fraction done.


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="stepscope measure-memory",
        description="Measure a run's peak memory on its device: a process trains for three steps.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(found)
    help_ = "settings as JSON, or a run.json; - is standard input"
    found.add_argument("--config", metavar="FILE", help=help_)
    help_ = "also measure other batch sizes, up to the limit, and recommend one"
    found.add_argument("--find-batch-size", action="store_true", help=help_)
    found.add_argument("--json", action="store_true", help="print one JSON object")
    for field in SETTINGS:
        if field not in _OWN_OPTIONS:
            is_switch = isinstance(getattr(RunConfig(), field), bool)
            found.add_argument(
                f"--{field.replace('_', '-')}",
                dest=f"field_{field}",
                metavar="VALUE",
                nargs="?" if is_switch else None,
                const="true" if is_switch else None,
                help=argparse.SUPPRESS,
            )
    return found


def config_of(options: argparse.Namespace, devices: Sequence[TrainDevice]) -> RunConfig:
    """Return the configuration of options and settings file. Raises UsageError and ConfigError."""
    for field in SETTINGS:
        text = getattr(options, f"field_{field}", None)
        if text is not None:
            options.set.append(f"{field}={text}")
    if options.config is None:
        return configured(options, devices)
    config = RunConfig.from_dict(_read_settings(options.config))
    if options.workload is not None:
        raise UsageError("--config: has a workload, got --workload as well. Omit one of them.")
    changes = {field: value_of(field, text) for field, text in settings_of(options).items()}
    if options.device is not None:
        changes["device"] = find_device(options.device, devices)
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
    except (UsageError, ConfigError) as error:
        print_error(str(error))
        return USAGE
    except ProbeError as error:
        print_error(f"The measurement failed. {error}")
        return DOES_NOT
    except (OSError, StoreError) as error:
        print_error(f"A file or folder cannot be used: {error}.")
        return DOES_NOT
    except KeyboardInterrupt:
        return STOPPED


def _run(options: argparse.Namespace) -> int:
    if is_file(options.workload):
        choose(options.workload)
    _show_progress("Loading PyTorch", 0.0)
    # Imported here because importing torch takes seconds, in which Ctrl-C must work.
    devices = importlib.import_module("trainer.devices").list_devices()
    try:
        config = config_of(options, devices)
        device = checked_device(config, devices)
        if options.find_batch_size:
            found = _search(config, _show_progress)
        else:
            with tempfile.TemporaryDirectory(prefix="stepscope-probe-") as folder:
                os.environ["STEPSCOPE_ALERTS"] = "off"
                found = _probe(config, device, Path(folder), 0.0, _show_progress)
    finally:
        _clear_progress()
    lines = _search_lines(found) if options.find_batch_size else _lines(found)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines))
    fits = found["largest"] is not None if options.find_batch_size else found["fits"]
    return FITS if fits else DOES_NOT


def _probe(
    config: RunConfig, device: TrainDevice, folder: Path, seconds: float, progress: Progress
) -> dict[str, Any]:
    measure = importlib.import_module("trainer.memory_estimate.probe").measure
    found = measure(config, device, folder, seconds=seconds, progress=progress)
    return {**found, "config": config.to_dict()}


def _search(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Find batch sizes with a process for each probe. Raises ProbeError and OSError."""
    count = 0

    def measure(size: int) -> Mapping[str, Any]:
        nonlocal count
        progress(f"Measuring batch size {size:,}", count / (count + 4))
        count += 1
        probe = MemoryProbeRun(replace(config, batch_size=size), seconds=RATE_SECONDS)
        probe.wait()
        output = probe.output()
        if output.reason is not None:
            raise ProbeError(f"Batch size {size:,}: {output.reason}")
        return {name: value for name, value in output.answer.items() if name != "config"}

    return {**find_batch_sizes(config, measure), "config": config.to_dict()}


def answer_job() -> None:
    """Answer a job, a line of JSON on stdin, for MemoryProbeRun; end with stdin.

    Each line is a JSON object: `progress` and `share`, then `answer`, or the `reason` of a failure.
    """
    # Output of torch or a workload must not mix with the lines.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    def progress(text: str, share: float) -> None:
        write(progress=text, share=share)

    job = json.loads(sys.stdin.readline())
    call_at_end_of(0, kill_group)
    try:
        config = RunConfig.from_dict(job["config"])
        if job["search"]:
            found = _search(config, progress)
        else:
            progress("Loading PyTorch", 0.1)
            devices = importlib.import_module("trainer.devices").list_devices()
            device = checked_device(config, devices)
            found = _probe(config, device, Path(job["folder"]), job["seconds"], progress)
    except (ConfigError, ProbeError, OSError, StoreError) as error:
        write(reason=str(error))
    else:
        write(answer=found)


def checked_device(config: RunConfig, devices: Sequence[TrainDevice]) -> TrainDevice:
    """Return the device of a configuration. Raises ConfigError if it cannot be measured."""
    refused = next(iter(validate(config, devices)), None) or probe_problem(config)
    refused = refused or data_problem(config) or user_problem(config)
    if refused is not None:
        raise ConfigError(refused)
    return next(device for device in devices if device.id == config.device)


def _lines(found: Mapping[str, Any]) -> list[str]:
    if not found["fits"]:
        return [f"Does not fit: {found['reason']}", f"Measured on {found['device_name']}."]
    lines = [
        f"Fits: measured {found['steps']} steps on {found['device_name']}.",
        f"{'Peak':<36} {format_bytes(found['measured_peak_bytes']):>10}",
    ]
    for name, size in found["parts"].items():
        lines.append(f"  {name.replace('_', ' '):<34} {format_bytes(size):>10}")
    if found["measured_reserved_bytes"] is not None:
        lines.append(f"{'Reserved':<36} {format_bytes(found['measured_reserved_bytes']):>10}")
    return [*lines, f"{'Left free':<36} {format_bytes(found['free_bytes']):>10}"]


def _search_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{'batch':>8} {'peak':>10} {'reserved':>10} {'samples/s':>11}"]
    for point in found["points"]:
        size = f"{point['batch_size']:>8,}"
        if not point["fits"]:
            lines.append(f"{size} does not fit")
            continue
        peak = format_bytes(point["measured_peak_bytes"])
        reserved = point["measured_reserved_bytes"]
        reserved_text = "" if reserved is None else format_bytes(reserved)
        rate = point["samples_per_sec"]
        speed = "" if rate is None else three_digits(rate)
        lines.append(f"{size} {peak:>10} {reserved_text:>10} {speed:>11}")
    return [*lines, found["why"]]


def _show_progress(text: str, share: float) -> None:
    """Print progress over the former progress."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}…", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--job"]:
        answer_job()
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sys.exit(main())
