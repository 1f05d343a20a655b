"""`stepscope lab train.py`: a sweep over a script that is not changed."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.cli.app_process import become_program
from stepscope.cli.arguments import script_parser
from stepscope.lab import command, gate
from stepscope.lab.command import UsageError, print_error
from stepscope.lab.folder import PLAN_JSON, SCHEMA, new_sweep_folder, read_plan, read_trials
from stepscope.lab.gate import Gate
from stepscope.lab.patch import write_patch
from stepscope.lab.plan import write_plan
from stepscope.lab.revision import check_links, repository
from stepscope.lab.script_plan import (
    REV,
    ScriptCommand,
    ScriptPlan,
    parse_variant,
    script_command,
)
from stepscope.lab.statistics import load_scipy
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.lab.trial_process import TrialProcess
from stepscope.run import runs_root
from stepscope.watch.script import split_options

SCRIPT_OPTIONS = frozenset(("--variant", "--gate", "--link", "--nproc-per-node"))
"""Options of a sweep over a script; without them the command sweeps a built-in workload."""
MAX_ROUNDS = 12
EXAMPLES = (
    'stepscope lab --variant tf32 --variant "num_workers=4 pin_memory" train.py --epochs 90',
    'stepscope lab --variant "bs64: --batch-size 64" train.py --batch-size 32 --out {out}',
    "stepscope lab --gate step_time:+3% --variant rev:my-branch --link data train.py",
    "stepscope lab --variant env:OMP_NUM_THREADS=1 train.py",
    "stepscope lab --nproc-per-node 2 --variant fused train_ddp.py",
)


def main(argv: Sequence[str]) -> int:
    """Run a sweep over the script in `argv`, or over a workload; return the exit code."""
    if not SCRIPT_OPTIONS.intersection(word.partition("=")[0] for word in argv):
        return become_program("trainer.lab", argv)
    options, words = split_options(script_sweep_parser(), argv)
    return command.exit_code(partial(_lab, options, words), "stepscope.lab.script_trial")


def _lab(options: argparse.Namespace, words: Sequence[str], process: TrialProcess) -> int:
    load_scipy()
    plan = _plan(options, words)
    folder = process.folder = folder_of(options, plan)
    command.print_estimate(folder, plan)
    sweep = SweepRunner(folder, plan, process, command.print_progress).run()
    write_patch(folder, plan, sweep)
    code = command.close(sweep, resume_text(folder), gates=bool(options.gate))
    if not options.gate or code != command.FINISHED:
        return code
    return _report_gates(folder, plan, sweep, options.gate)


def resume_text(folder: Path) -> str:
    """Return how to resume the sweep of a script."""
    return f"give the same command with --folder {shlex.quote(str(folder))}"


def command_of(
    options: argparse.Namespace, words: Sequence[str], links: Sequence[str] = ()
) -> ScriptCommand:
    """Return the command of a script, or of a module with -m."""
    return script_command(
        words[0],
        words[1:],
        is_module=options.module,
        links=links,
        nproc_per_node=options.nproc_per_node,
    )


def _plan(options: argparse.Namespace, words: Sequence[str]) -> ScriptPlan:
    if not options.variant:
        raise UsageError("--variant is missing. Give at least one change to measure.")
    variants = tuple(map(parse_variant, options.variant))
    if options.link:
        if not any(REV in variant.changes for variant in variants):
            raise UsageError("--link: requires a revision. Add --variant rev:REVISION.")
        check_links(options.link, repository(Path.cwd()))
    chosen = command.numbers(options)
    if options.gate:
        rounds = chosen.get("max_rounds", MAX_ROUNDS)
        if rounds < 2:
            raise UsageError(f"--max-rounds: must be at least 2 with --gate, got {rounds}.")
        # An end at the first significant look would bias the interval.
        chosen |= {"find_best": False, "looks": (rounds,)}
    return ScriptPlan(script=command_of(options, words, options.link), variants=variants, **chosen)


def _report_gates(
    folder: Path, plan: ScriptPlan, sweep: Mapping[str, Any], gates: Sequence[Gate]
) -> int:
    """Print the results of the gates as Markdown; return the exit code."""
    failed = [
        f"{variant['name']}: {variant['reason']}"
        for variant in sweep["variants"]
        if variant["verdict"] == "failed"
    ]
    if failed:
        print_error(f"Not measured: {' '.join(failed)}")
        return command.FAILED
    trials = read_trials(folder)
    missing = [one.metric for one in gates if gate.metric_key(trials, one.metric) is None]
    if missing:
        print_error(f"{', '.join(missing)} was not measured. Remove this gate.")
        return command.FAILED
    results = gate.check_gates(plan, trials, gates)
    verdict = gate.worst(results)
    code = gate.EXIT_CODES[verdict]
    print(f"\n{gate.markdown(results)}\nResult: **{verdict}** (exit code {code}).")
    return code


def folder_of(options: argparse.Namespace, plan: ScriptPlan) -> Path:
    """Return the folder of the sweep. A plan in it is only compared: its command never runs."""
    folder = (
        Path(options.folder) if options.folder else new_sweep_folder(runs_root(), plan.workload)
    )
    if (folder / PLAN_JSON).is_file():
        # Through JSON, which has no tuples.
        if read_plan(folder) != json.loads(json.dumps({"schema": SCHEMA, **plan.to_dict()})):
            raise UsageError(
                f"--folder: {options.folder} has the plan of another sweep, or the script was "
                "edited. Repeat the whole command to resume it, or give another folder."
            )
        return folder
    write_plan(folder, plan)
    return folder


def trial_parser(name: str, about: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser for the options of trials, which precede a script."""
    found = script_parser(name, about, examples)
    found.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="start each trial by torchrun, with N ranks",
    )
    return found


def script_sweep_parser() -> argparse.ArgumentParser:
    """Return the parser of the options before a script."""
    about = "Measure which changes make a script faster on this machine."
    found = trial_parser("lab", about, EXAMPLES)
    found.add_argument(
        "--variant",
        action="append",
        metavar="V",
        help="'NAME: ARGUMENTS', env:NAME=VALUE, rev:REVISION or settings; repeat for more",
    )
    found.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="PATH",
        help="a path of the repository, such as ignored data, that revisions share; may be "
        "repeated",
    )
    command.add_gate(found)
    command.add_numbers(found)
    return found
