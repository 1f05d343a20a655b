"""`python -m trainer.lab`: run a sweep in a terminal, or go on with the one in a folder."""

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
from stepscope.common.formatting import format_duration, printable
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
from trainer.lab.options import PLANNING, UsageError, is_file, parser, plan_of
from trainer.lab.plan import SweepPlan, estimate, with_problems
from trainer.lab.report import to_csv, to_html
from trainer.lab.sweep import SweepRunner
from trainer.lab.terminal import Terminal, closing, table
from trainer.lab.trial_process import TrialProcess
from trainer.lab.variants import arms

FINISHED, FAILED, USAGE, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parser().parse_args(arguments)
    taker = TrialProcess()
    for number in (signal.SIGINT, signal.SIGTERM):  # also before there is a sweep to stop
        signal.signal(number, lambda *_: taker.stop())
    try:
        _check_outputs(options)
        return _run(options, taker)
    except (UsageError, ConfigError, SweepError, UserWorkloadError) as error:
        _say(str(error))
        return USAGE
    except OSError as error:
        _say(f"The sweep's folder or a result cannot be written: {error}.")
        return FAILED


def _run(options: argparse.Namespace, taker: TrialProcess) -> int:
    if is_file(options.workload):
        choose(options.workload)
    # Only now: importing torch takes seconds, in which a Ctrl-C may come.
    devices = importlib.import_module("trainer.devices").list_devices()
    if options.list:
        plan, _ = plan_of(options, devices)
        for arm in arms(plan.config, devices):
            print(f"{arm.name:<34} {arm.label if arm.problem is None else arm.problem}")
        return FINISHED
    folder, plan = _folder_and_plan(options, devices)
    taker.folder, terminal = folder, Terminal()
    _say_estimate(folder, plan)

    def show(sweep: dict[str, Any]) -> None:
        terminal.show(sweep)
        if options.json not in (None, "-"):
            write_json(Path(options.json), sweep)

    config = plan.config
    refused = next(iter(validate(config, devices)), None)
    refused = refused or data_problem(config) or user_problem(config)
    if refused is not None:
        sweep = _refuse(folder, f"The baseline cannot run here: {refused}")
    else:
        sweep = SweepRunner(folder, plan, devices, taker, show).run()
    terminal.clear()
    return _close(options, folder, sweep)


def _folder_and_plan(
    options: argparse.Namespace, devices: Sequence[TrainDevice]
) -> tuple[Path, SweepPlan]:
    """Return a sweep that is resumed, or make a new one.

    The file of a workload of the user's own is never taken from a folder: it would be run.
    """
    resumes = bool(options.folder) and (Path(options.folder) / PLAN_JSON).is_file()
    if resumes and is_file(options.workload):
        options.workload = None
    given = [name for name in PLANNING if getattr(options, name)]
    if resumes:
        if given:
            raise UsageError(
                f"--folder: holds a plan already, got --{given[0].replace('_', '-')} as well. "
                "Give --folder alone to go on with it, or another folder."
            )
        return Path(options.folder), _planned(Path(options.folder), devices)
    if options.folder and not given:
        raise UsageError(f"--folder: {options.folder} holds no plan.json. Give --workload too.")
    plan, notes = plan_of(options, devices)
    for note in notes:
        _say(f"{note}.")
    if options.folder:
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = new_sweep_folder(runs_root(), plan.config.workload)
    write_plan(folder, plan)
    return folder, plan


def _planned(folder: Path, devices: Sequence[TrainDevice]) -> SweepPlan:
    values = read_plan(folder)
    try:
        return with_problems(SweepPlan.from_dict(values), devices)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SweepError(f"{folder.name}/{PLAN_JSON}: is no plan ({error}).") from error


def _say_estimate(folder: Path, plan: SweepPlan) -> None:
    config = plan.config
    known = seconds_per_sample(folder.parent.parent, config.workload, config.device)
    takes, count = estimate(plan, known), len(plan.arms)
    source = "by an earlier sweep" if known else "assumed"
    _say(
        f"{folder}: {count} arm{'' if count == 1 else 's'}; about {format_duration(takes.low)} if "
        f"each is decided at the first look, {format_duration(takes.high)} at most (seconds a "
        f"sample {source})."
    )


def _refuse(folder: Path, reason: str) -> dict[str, Any]:
    """Note in sweep.json that the sweep cannot run, also for a page that waits for it.

    A sweep that has finished stays as it is: nothing of it has to run. Raises SweepError while
    another process works on it.
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
    for path, text in ((options.html, to_html), (options.csv, to_csv)):
        if path:
            atomic_write(Path(path), text(sweep), durable=False)
    if sweep["baseline"] is not None:
        lines = [*table(sweep), "", *closing(sweep)]
        print("\n".join(lines), file=sys.stderr if options.json == "-" else sys.stdout)
    else:
        _say(sweep["reason"])
    if sweep["status"] == "stopped":
        given = user_workload() if sweep["workload"] == Workload.CUSTOM else None
        own = f" --workload {shlex.quote(f'{given.path}:{given.function}')}" if given else ""
        _say(f"To go on: python -m trainer.lab --folder {shlex.quote(str(folder))}{own}")
        return STOPPED
    return FINISHED if sweep["status"] == "finished" else FAILED


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse a result that could not be written at the end. Raises UsageError."""
    for name in ("json", "html", "csv"):
        path = getattr(options, name)
        if path and path != "-" and not (Path(path).parent.is_dir() and not Path(path).is_dir()):
            raise UsageError(f"--{name}: must be a file in an existing folder, got {path!r}.")


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
