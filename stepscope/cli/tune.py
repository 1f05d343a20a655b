"""`stepscope tune train.py`: find the settings that make a script faster, and print the patch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

from stepscope.cli.lab import (
    command_of,
    folder_of,
    numbers_of,
    resume_command,
    script_parser,
)
from stepscope.common.formatting import printable
from stepscope.host.environment import granted_cores
from stepscope.lab import command
from stepscope.lab.command import UsageError, print_error
from stepscope.lab.patch import FP16, ManualChange, Patch, write_patch
from stepscope.lab.script_plan import TunePlan, parse_variant, tuning_candidates
from stepscope.lab.statistics import load_scipy
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.lab.trial_process import TrialProcess
from stepscope.lab.verdict_text import is_recommended, signed
from stepscope.settings import SettingError, parse
from stepscope.watch.script import split_options

MAX_MINUTES = 10_000
EXAMPLES = (
    "stepscope tune train.py --epochs 90",
    "stepscope tune --minutes 10 --apply faster.py train.py --output {out}",
    "stepscope tune --folder runs/lab/NAME train.py    # resumes with the same command",
)


def main(argv: Sequence[str]) -> int:
    """Tune the script named in `argv`; return the exit code."""
    options, words = split_options(_parser(), argv)
    sweep = partial(_tune, options, words, argv)
    return command.exit_code(sweep, "stepscope.lab.script_trial")


def _tune(
    options: argparse.Namespace, words: Sequence[str], argv: Sequence[str], process: TrialProcess
) -> int:
    if options.apply and os.path.lexists(options.apply):
        raise UsageError(f"--apply: {options.apply} exists. Give the name of a new file.")
    if options.apply and not os.path.isdir(os.path.dirname(options.apply) or "."):
        raise UsageError(f"--apply: the folder of {options.apply} is missing. Create it first.")
    load_scipy()
    plan = _plan(options, words)
    folder = process.folder = folder_of(options, plan)
    print_error(f"{folder}: {len(plan.variants)} settings in at most {plan.minutes:g} minutes.")
    sweep = SweepRunner(folder, plan, process, command.print_progress).run()
    patch = write_patch(folder, plan, sweep)
    if options.apply and patch.diff:
        with open(options.apply, "x", encoding="utf-8", newline="") as file:
            file.write(patch.text)
    elif options.apply:
        print_error(f"--apply: {options.apply} was not written: the patch changes no line.")
    resume = resume_command("tune", options, folder, argv)
    return command.close(sweep, resume, result_lines(sweep, patch))


def _plan(options: argparse.Namespace, words: Sequence[str]) -> TunePlan:
    given = numbers_of(options)
    if not 0 < options.minutes <= MAX_MINUTES:
        raise UsageError(
            f"--minutes: must be above 0 and at most {MAX_MINUTES}, got {options.minutes:g}."
        )
    script = command_of(options, words)
    cores = granted_cores() // (script.nproc_per_node or 1)
    texts = tuning_candidates(max(1, cores))
    if options.settings is not None:
        texts = options.settings.split(",")
    try:
        empty = [text for text in texts if not parse([text])]
    except SettingError as error:
        raise UsageError(f"--settings: {error}") from error
    if empty:
        raise UsageError("--settings: has no setting between two commas. Remove one comma.")
    variants = tuple(map(parse_variant, texts))
    return TunePlan(script=script, minutes=options.minutes, variants=variants, **given)


def result_lines(sweep: Mapping[str, Any], patch: Patch) -> list[str]:
    """Return the gain and the patch, then what did not help or was not measured."""
    best, finished = sweep["best"], sweep["status"] == "finished"
    used: Set[str] = frozenset()
    if not finished:
        lines = [str(sweep["reason"])]
        if not any(variant["rounds"] for variant in sweep["variants"]):
            return [printable(line) for line in lines]
    elif best is None:
        is_open = any(variant["verdict"] == "undecided" for variant in sweep["variants"])
        text = "No setting was shown to be faster yet" if is_open else "No setting pays here"
        if any(variant["verdict"] == "faster" for variant in sweep["variants"]):
            text = "No faster setting keeps the loss"
        lines = [f"{text}: {_waits_for(sweep['baseline']['metrics'])}."]
    elif not is_recommended(best):
        used = set(best["variants"])
        names, loss = " + ".join(best["variants"]), best["loss"]["text"]
        lines = [f"Not confirmed: {names}: {best['text']}; {loss}."]
    else:
        used, lines = set(best["variants"]), _gain(best, patch)
    left_out = sweep["left_out"]
    refused = [
        variant for variant in sweep["variants"] if variant["verdict"] in ("failed", "impossible")
    ]
    others = [
        variant
        for variant in sweep["variants"]
        if variant not in refused and variant["name"] not in used
    ]
    lines += ["", "Did not help:" if finished else "Measured so far:"] * bool(others)
    for variant in others:
        reasons = [one for one in (variant["reason"], left_out.get(variant["name"])) if one]
        lines.append(
            f"  {variant['name']}: {variant['text']}" + f" ({' '.join(reasons)})" * bool(reasons)
        )
    lines += ["", "Not measured:"] * bool(refused)
    for variant in refused:
        reason = str(variant["reason"])
        if variant["verdict"] == "impossible":  # it begins with the setting
            reason = reason.partition(": ")[2]
        lines.append(f"  {variant['name']}: {reason}")
    # Only a process that uses a GPU has allocated memory there.
    if finished and sweep["baseline"]["metrics"]["peak_allocated"] and "bf16" not in used:
        lines += _by_hand("Not tried", FP16)
    return ["\t".join(map(printable, line.split("\t"))) for line in lines]


def _gain(best: Mapping[str, Any], patch: Patch) -> list[str]:
    """Return the factor of the best combination, the diff, and the changes by hand."""
    low, high = (1 + best[name] for name in ("low", "high"))
    peaks = (
        (best["baseline"][key], best["metrics"][key]) for key in ("peak_allocated", "peak_process")
    )
    memory = next((f", peak memory {signed(b / a - 1)}" for a, b in peaks if a and b), "")
    lines = [
        f"{' + '.join(best['variants'])}: {1 + best['effect']:.2f} × faster "
        f"[{low:.2f}, {high:.2f}], {best['loss']['text']}{memory}."
    ]
    diff = patch.diff.split("\n")[:-1]
    if diff:
        count = sum(line.startswith("+") for line in diff[2:])
        lines += ["", f"{count} line{'s' * (count > 1)} (patch.diff in the folder):", *diff]
    for change in patch.by_hand:
        lines += _by_hand("By hand", change)
    return lines


def _by_hand(title: str, change: ManualChange) -> list[str]:
    return ["", f"{title}, {change.setting}, {change.where}:", *(f"    {x}" for x in change.lines)]


def _waits_for(metrics: Mapping[str, Any]) -> str:
    """Return what most of a step of the baseline is."""
    step = metrics["step_time"]
    if not step:
        return "the baseline was not measured"
    names = {"data_wait": "data", "h2d": "copies to the GPU", "gpu_time": "the GPU"}
    shares = {text: (metrics[name] or 0.0) / step for name, text in names.items()}
    text = max(shares, key=lambda one: shares[one])
    if shares[text] < 0.3:
        return f"the step computes; it waits for data {shares['data']:.0%} of the time"
    return f"the step waits for {text} ({min(1.0, shares[text]):.0%} of the time)"


def _parser() -> argparse.ArgumentParser:
    about = "Find the settings that make a script faster on this machine."
    found = script_parser("tune", about, EXAMPLES)
    found.add_argument("--minutes", metavar="N", type=float, default=20.0, help="time budget (20)")
    found.add_argument(
        "--settings", metavar="LIST", help='only these, as "tf32,num_workers=2 pin_memory"'
    )
    found.add_argument("--apply", metavar="FILE", help="write the patched script to a new file")
    command.add_common(found)
    return found
