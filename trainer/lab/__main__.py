"""`python -m trainer.lab`: run or resume a sweep in a terminal."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stepscope.lab.command import (
    FINISHED,
    UsageError,
    close,
    exit_code,
    print_estimate,
    print_progress,
)
from stepscope.lab.folder import (
    PLAN_JSON,
    SweepError,
    new_sweep_folder,
    read_plan,
)
from stepscope.lab.plan import write_plan
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.lab.trial_process import TrialProcess
from stepscope.run import runs_root
from trainer.lab.options import PLANNING, is_file, parser, plan_of
from trainer.lab.plan import WorkloadPlan, all_variants, speed_problem
from trainer.training.config_validation import TrainDevice, validate
from trainer.workloads.custom_file import choose, user_problem
from trainer.workloads.datasets import data_problem


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    return exit_code(partial(_run, options), "trainer.lab.trial_run")


def _run(options: argparse.Namespace, process: TrialProcess) -> int:
    if is_file(options.workload):
        choose(options.workload)
    # Imported here because importing torch takes seconds, in which Ctrl-C must work.
    devices = importlib.import_module("trainer.training.devices").list_devices()
    if options.list:
        for variant in all_variants(plan_of(options, devices).config, devices):
            text = variant.label if variant.problem is None else variant.problem
            print(f"{variant.name:<34} {text}")
        return FINISHED
    folder, plan = _folder_and_plan(options, devices)
    process.folder = folder
    print_estimate(folder, plan)
    config = plan.config
    refused = next(iter(validate(config, devices)), None) or data_problem(config)
    refused = refused or user_problem(config) or speed_problem(config.device)
    if refused is not None:
        raise SweepError(f"The baseline cannot run here: {refused}")
    sweep = SweepRunner(folder, plan, process, print_progress).run()
    custom = f" --workload {shlex.quote(options.workload)}" if is_file(options.workload) else ""
    return close(sweep, f"stepscope lab --folder {shlex.quote(str(folder))}{custom}")


def _folder_and_plan(
    options: argparse.Namespace, devices: Sequence[TrainDevice]
) -> tuple[Path, WorkloadPlan]:
    """Return folder and plan of a new or a resumed sweep, whose folder names no file to execute."""
    folder = Path(options.folder) if options.folder else None
    given = [name for name in PLANNING if getattr(options, name)]
    if folder is None or not (folder / PLAN_JSON).is_file():
        if folder is not None and not given:
            raise UsageError(f"--folder: {folder} has no plan.json. Give --workload too.")
        plan = plan_of(options, devices)
        folder = folder or new_sweep_folder(runs_root(), plan.config.workload)
        write_plan(folder, plan)
        return folder, plan
    if is_file(options.workload):
        given.remove("workload")
    if given:
        raise UsageError(
            f"--folder: has a plan already, got --{given[0].replace('_', '-')} as well. Give "
            "--folder alone to resume it, or another folder."
        )
    try:
        return folder, WorkloadPlan.from_dict(read_plan(folder), devices)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SweepError(f"{folder.name}/{PLAN_JSON}: is no plan ({error}).") from error


if __name__ == "__main__":
    sys.exit(main())
