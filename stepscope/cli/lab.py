"""`stepscope lab train.py`: a sweep over a script that is not changed."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from stepscope.common.secrets import without_secrets
from stepscope.lab import command, gate
from stepscope.lab.command import UsageError, print_error
from stepscope.lab.folder import PLAN_JSON, SCHEMA, new_sweep_folder, read_plan, read_samples
from stepscope.lab.gate import Gate
from stepscope.lab.patch import write_patch
from stepscope.lab.plan import write_plan
from stepscope.lab.revision import check_links, repository
from stepscope.lab.script_plan import (
    ARGUMENTS,
    REV,
    ScriptCommand,
    ScriptPlan,
    parse_variant,
    script_command,
    with_arguments,
)
from stepscope.lab.statistics import load_scipy
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.lab.trial_process import TrialProcess
from stepscope.lab.verdict_text import percent
from stepscope.run import runs_root

OF_SCRIPTS = frozenset(("--variant", "--gate", "--link", "--nproc-per-node"))
MAX_ROUNDS = 12
NPROC: Any = {"type": int, "metavar": "N", "help": "start each trial by torchrun, with N ranks"}
EXAMPLES = (
    'stepscope lab --variant tf32 --variant "num_workers=4 pin_memory" train.py --epochs 90',
    'stepscope lab --variant "bs64: --batch-size 64" train.py --batch-size 32 --out {out}',
    "stepscope lab --gate step_time:+3% --variant rev:my-branch --link data train.py",
    "stepscope lab --variant env:OMP_NUM_THREADS=1 --variant python:/opt/new/bin/python train.py",
    "stepscope lab --nproc-per-node 2 --variant fused train_ddp.py",
)


def script_at(argv: Sequence[str], parser: argparse.ArgumentParser) -> int | None:
    """Return the index of the script or of -m; None if the options name no script."""
    known = parser._option_string_actions
    at = 0
    while at < len(argv):
        name, equals, _ = argv[at].partition("=")
        if name == "-m" or not name.startswith("-"):
            return at
        if name not in known or known[name].dest == "help":
            return None
        at += 2 if known[name].nargs is None and not equals else 1
    return None


def main(argv: Sequence[str], at: int | None) -> int:
    """Run a sweep over the script at `argv[at]`; return the exit code."""
    parser = script_sweep_parser()
    options = parser.parse_args(argv[:at])  # which prints the help, if asked
    if at is None:
        parser.error("no script given: name a file, or a module after -m.")
    return command.exit_code(partial(_lab, options, argv, at), "stepscope.lab.script_trial")


def _lab(options: argparse.Namespace, argv: Sequence[str], at: int, process: TrialProcess) -> int:
    command.check_outputs(options)
    load_scipy()
    gates = _gates(options.gate)
    plan = _plan(options, argv[at:])
    folder = process.folder = folder_of(options, plan)
    command.print_estimate(folder, plan, None)
    for variant in plan.variants:
        if ARGUMENTS in variant.changes:
            words = with_arguments(plan.script.arguments, variant.changes[ARGUMENTS])
            print_error(
                f"{variant.name}: {shlex.join([plan.script.target, *without_secrets(words)])}"
            )
    if gates:
        print_error(
            f"{plan.max_rounds} rounds resolve about ±"
            f"{percent(gate.expected_resolution(plan, len(gates)))} if processes of one script "
            f"differ by {percent(gate.ASSUMED_SPREAD)} (standard deviation)."
        )
    sweep = SweepRunner(folder, plan, process, command.shown(options)).run()
    write_patch(folder, plan, sweep)
    words = list(argv) if options.folder else ["--folder", str(folder), *argv]
    again = shlex.join(["stepscope", "lab", *words])
    code = command.close(options, sweep, again, gates=bool(gates))
    if not gates or code != command.FINISHED:
        return code
    return _report_gates(
        folder, plan, sweep, gates, sys.stderr if options.json == "-" else sys.stdout
    )


def command_of(
    options: argparse.Namespace, words: Sequence[str], links: Sequence[str] = ()
) -> ScriptCommand:
    """Return the command of a script or of `-m module`. Raises UsageError."""
    is_module = words[0] == "-m"
    if is_module and len(words) == 1:
        raise UsageError("-m: must be followed by a module. Name one.")
    target, *arguments = words[1:] if is_module else words
    ranks = options.nproc_per_node
    return script_command(target, arguments, is_module=is_module, links=links, nproc_per_node=ranks)


def numbers_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of a plan over a script. Raises UsageError."""
    chosen = command.numbers(options)
    if chosen.get("steps") == 1:
        raise UsageError("--steps: must be at least 2, got 1. Omit it for an automatic number.")
    return chosen


def _plan(options: argparse.Namespace, words: Sequence[str]) -> ScriptPlan:
    if not options.variant:
        raise UsageError("--variant is missing. Give at least one change to measure.")
    variants = tuple(map(parse_variant, options.variant))
    if options.link:
        if not any(REV in variant.changes for variant in variants):
            raise UsageError("--link: requires a revision. Add --variant rev:REVISION.")
        check_links(options.link, repository(Path.cwd()))
    chosen = numbers_of(options)
    if options.gate:  # an end at the first significant look would bias the interval
        chosen |= {"find_best": False, "looks": (chosen.get("max_rounds", MAX_ROUNDS),)}
        if chosen["looks"][0] < 2:
            raise UsageError(
                f"--max-rounds: must be at least 2 with --gate, got {chosen['max_rounds']}. An "
                "interval needs two rounds."
            )
    return ScriptPlan(script=command_of(options, words, options.link), variants=variants, **chosen)


def _gates(texts: Sequence[str]) -> list[Gate]:
    try:
        return [gate.parse_gate(text) for text in texts]
    except ValueError as error:
        raise UsageError(str(error)) from error


def _report_gates(
    folder: Path, plan: ScriptPlan, sweep: Mapping[str, Any], gates: Sequence[Gate], out: TextIO
) -> int:
    """Write the results of the gates as Markdown to `out`; return the exit code."""
    failed = [
        f"{variant['name']}: {variant['reason']}"
        for variant in sweep["variants"]
        if variant["verdict"] == "failed"
    ]
    if failed:
        print_error(f"Not measured: {' '.join(failed)}")
        return command.FAILED
    trials = read_samples(folder)
    missing = [one.metric for one in gates if gate.metric_key(trials, one.metric) is None]
    if missing:
        print_error(f"{', '.join(missing)} was not measured. Remove this gate.")
        return command.FAILED
    results = gate.check_gates(plan, trials, gates)
    verdict = gate.worst(results)
    code = gate.EXIT_CODES[verdict]
    out.write(f"\n{gate.markdown(results)}\nResult: **{verdict}** (exit code {code}).\n")
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


def script_parser(name: str, about: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser for the options that precede a script."""
    return argparse.ArgumentParser(
        prog=f"stepscope {name.partition(' ')[0]}",
        usage=f"stepscope {name} [options] (script.py | -m module) [arguments]",
        description=about,
        epilog="\n  ".join(("examples:", *examples)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def script_sweep_parser() -> argparse.ArgumentParser:
    """Return the parser of the options before a script."""
    about = "Measure which changes make a script faster on this machine."
    found = script_parser("lab --variant V", about, EXAMPLES)
    kinds = "'NAME: ARGUMENTS', env:NAME=VALUE, python:PATH, rev:REVISION or settings"
    help_ = f"{kinds}; repeat for more variants"
    found.add_argument("--variant", action="append", metavar="V", help=help_)
    help_ = "a path of the repository, such as ignored data, that revisions share; may be repeated"
    found.add_argument("--link", action="append", default=[], metavar="PATH", help=help_)
    help_ = "exit code 4 if METRIC (step_time, peak_memory, energy) rises by more than P%%"
    found.add_argument("--gate", action="append", default=[], metavar="METRIC:+P%", help=help_)
    found.add_argument("--nproc-per-node", **NPROC)
    command.add_numbers(found)
    return found
