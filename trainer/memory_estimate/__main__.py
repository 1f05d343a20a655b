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

from stepscope.common.config_issue import ConfigError
from stepscope.common.formatting import format_bytes, three_digits
from stepscope.host.process_limits import call_at_end_of, kill_group
from stepscope.lab.command import UsageError, print_error
from trainer.config import RunConfig
from trainer.config_validation import TrainDevice, validate
from trainer.custom_workload import UserWorkloadError, choose, user_problem
from trainer.datasets import data_problem
from trainer.lab.options import is_file
from trainer.memory_estimate.options import ABSENT, ABSENT_GPU, config_of, parser

FITS, DOES_NOT, USAGE, STOPPED = 0, 1, 2, 130


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
    """Read a job from stdin, one line of JSON, and print its estimate for the page.

    Each line of stdout is a JSON object: `progress` and `share`, then `answer`, or the `reason` of
    a failure. The process ends at the end of stdin.
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
    refused = refused or user_problem(config)
    if refused is not None:
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
