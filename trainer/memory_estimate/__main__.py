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

from stepscope.common.config_issue import ConfigError
from stepscope.common.formatting import format_bytes, three_digits
from stepscope.host.process_limits import call_at_end_of, kill_group
from stepscope.lab.command import UsageError, print_error
from stepscope.store import StoreError
from trainer.config import RunConfig
from trainer.config_validation import TrainDevice, validate
from trainer.custom_workload import choose, user_problem
from trainer.datasets import data_problem
from trainer.lab.options import add_settings, configured, is_file
from trainer.memory_estimate import ProbeError, probe_problem
from trainer.memory_estimate.batch_size import find_batch_sizes
from trainer.runners.child_process import MemoryProbeRun

EXAMPLES = """\
examples:
  stepscope measure-memory --workload gpt --batch-size 64 --precision bf16 --json
  stepscope measure-memory --workload resnet --set activation_checkpointing=1 --set optimizer=sgd
  stepscope measure-memory --workload digits_cnn --find-batch-size

Exit codes: 0 it fits; 1 it does not fit, or the measurement failed; 2 wrong usage; 130 stopped.
"""
RATE_SECONDS = 1.0  # Time that each probe of the search trains for, after its first step.
FITS, DOES_NOT, USAGE, STOPPED = 0, 1, 2, 130

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
    help_ = "also measure other batch sizes, up to the limit, and recommend one"
    found.add_argument("--find-batch-size", action="store_true", help=help_)
    found.add_argument("--json", action="store_true", help="print one JSON object")
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
        config = configured(options, devices)
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
