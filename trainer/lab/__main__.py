"""`python -m trainer.lab`: run or resume a sweep in a terminal."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_write
from stepscope.common.formatting import format_duration
from stepscope.run import process_identity, runs_root
from trainer.config import ConfigError, Workload
from trainer.config_validation import TrainDevice, validate
from trainer.custom_workload import UserWorkloadError, choose, user_problem, user_workload
from trainer.datasets import data_problem
from trainer.lab.folder import (
    PLAN_JSON,
    SWEEP_JSON,
    SweepError,
    new_sweep_folder,
    only_one,
    read_plan,
    read_sweep,
    seconds_per_sample,
    write_json,
    write_plan,
)
from trainer.lab.options import PLANNING, UsageError, is_file, parser, plan_of, print_error
from trainer.lab.plan import SweepPlan, estimate, with_problems
from trainer.lab.report import closing, progress_line, table, to_csv
from trainer.lab.sweep import SweepRunner
from trainer.lab.trial_process import TrialProcess
from trainer.lab.variants import all_variants, speed_problem

FINISHED, FAILED, USAGE, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parser().parse_args(arguments)
    process = TrialProcess()
    for number in (signal.SIGINT, signal.SIGTERM):  # also before the sweep starts
        signal.signal(number, lambda *_: process.stop())
    try:
        _check_outputs(options)
        return _run(options, process)
    except (UsageError, ConfigError, SweepError, UserWorkloadError) as error:
        print_error(str(error))
        return USAGE
    except OSError as error:
        print_error(f"The folder of the sweep or a result cannot be written: {error}.")
        return FAILED


def _run(options: argparse.Namespace, process: TrialProcess) -> int:
    if is_file(options.workload):
        choose(options.workload)
    # Imported here because importing torch takes seconds, in which Ctrl-C must work.
    devices = importlib.import_module("trainer.devices").list_devices()
    if options.list:
        for variant in all_variants(plan_of(options, devices)[0].config, devices):
            text = variant.label if variant.problem is None else variant.problem
            print(f"{variant.name:<34} {text}")
        return FINISHED
    folder, plan = _folder_and_plan(options, devices)
    process.folder = folder
    _print_estimate(folder, plan)

    def show(sweep: dict[str, Any]) -> None:
        print_error(progress_line(sweep))
        if options.json not in (None, "-"):
            write_json(Path(options.json), sweep)

    config = plan.config
    refused = next(iter(validate(config, devices)), None)
    refused = refused or data_problem(config) or user_problem(config)
    refused = refused or speed_problem(config.device)
    if refused is not None:
        sweep = _refuse(folder, f"The baseline cannot run here: {refused}")
    else:
        sweep = SweepRunner(folder, plan, devices, process, show).run()
    return _close(options, folder, sweep)


def _folder_and_plan(
    options: argparse.Namespace, devices: Sequence[TrainDevice]
) -> tuple[Path, SweepPlan]:
    """Return folder and plan of a new or a resumed sweep.

    The file of a custom workload is never taken from a folder, because it would be executed.
    """
    folder = Path(options.folder) if options.folder else None
    resumes = folder is not None and (folder / PLAN_JSON).is_file()
    if resumes and is_file(options.workload):
        options.workload = None
    given = [name for name in PLANNING if getattr(options, name)]
    if folder is not None and resumes:
        if given:
            raise UsageError(
                f"--folder: has a plan already, got --{given[0].replace('_', '-')} as well. "
                "Give --folder alone to resume it, or another folder."
            )
        try:
            return folder, with_problems(SweepPlan.from_dict(read_plan(folder)), devices)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SweepError(f"{folder.name}/{PLAN_JSON}: is no plan ({error}).") from error
    if folder is not None and not given:
        raise UsageError(f"--folder: {options.folder} has no plan.json. Give --workload too.")
    plan, notes = plan_of(options, devices)
    for note in notes:
        print_error(f"{note}.")
    if folder is None:
        folder = new_sweep_folder(runs_root(), plan.config.workload)
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder, plan)
    return folder, plan


def _print_estimate(folder: Path, plan: SweepPlan) -> None:
    config = plan.config
    known = seconds_per_sample(folder.parent.parent, config.workload, config.device)
    duration, count = estimate(plan, known), len(plan.arms)
    source = "measured in an earlier sweep" if known else "assumed"
    print_error(
        f"{folder}: {count} variant{'' if count == 1 else 's'}; about "
        f"{format_duration(duration.low)} if all are decided at the first look, at most "
        f"{format_duration(duration.high)} (duration of a trial: {source})."
    )


def _refuse(folder: Path, reason: str) -> dict[str, Any]:
    """Write to sweep.json why the sweep cannot run, also for a page that waits for it.

    A finished sweep stays unchanged. Raises SweepError if another process runs it.
    """
    with only_one(folder):
        sweep = read_sweep(folder)
        if sweep["status"] == "finished":
            return sweep
        now = {"status": "failed", "reason": reason, "updated": time.time(), **process_identity()}
        write_json(folder / SWEEP_JSON, sweep | now)
        return sweep | now


def _close(options: argparse.Namespace, folder: Path, sweep: dict[str, Any]) -> int:
    """Print and write the results; return the exit code."""
    if options.json == "-":
        print(json.dumps(sweep, indent=1))
    elif options.json:
        write_json(Path(options.json), sweep)
    if options.csv:
        atomic_write(Path(options.csv), to_csv(sweep), durable=False)
    if sweep["baseline"] is not None:
        lines = [*table(sweep), "", *closing(sweep)]
        print("\n".join(lines), file=sys.stderr if options.json == "-" else sys.stdout)
    else:
        print_error(sweep["reason"])
    if sweep["status"] == "stopped":
        given = user_workload() if sweep["workload"] == Workload.CUSTOM else None
        custom = f" --workload {shlex.quote(f'{given.path}:{given.function}')}" if given else ""
        print_error(f"To resume: stepscope lab --folder {shlex.quote(str(folder))}{custom}")
        return STOPPED
    return FINISHED if sweep["status"] == "finished" else FAILED


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise UsageError for a result file that cannot be written."""
    for name in ("json", "csv"):
        path = getattr(options, name)
        if path and path != "-" and not (Path(path).parent.is_dir() and not Path(path).is_dir()):
            raise UsageError(f"--{name}: must be a file in an existing folder, got {path!r}.")


if __name__ == "__main__":
    sys.exit(main())
