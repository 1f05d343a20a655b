"""`stepscope tune train.py`: find the settings that make a script faster, and print the patch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import number_type
from stepscope.cli.lab import command_of, folder_of, resume_text, trial_parser
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

EXAMPLES = (
    "stepscope tune train.py --epochs 90",
    "stepscope tune --minutes 10 --apply faster.py train.py --output {out}",
    "stepscope tune --folder runs/lab/NAME train.py    # resumes with the same command",
)


def main(argv: Sequence[str]) -> int:
    """Tune the script named in `argv`; return the exit code."""
    options, words = split_options(_parser(), argv)
    return command.exit_code(partial(_tune, options, words), "stepscope.lab.script_trial")


def _tune(options: argparse.Namespace, words: Sequence[str], process: TrialProcess) -> int:
    apply = options.apply
    if apply is not None and (os.path.lexists(apply) or not apply.parent.is_dir()):
        raise UsageError(f"--apply: must be a new file in an existing folder, got {apply}.")
    load_scipy()
    plan = _plan(options, words)
    folder = process.folder = folder_of(options, plan)
    print_error(f"{folder}: {len(plan.variants)} settings in about {plan.minutes:g} minutes.")
    sweep = SweepRunner(folder, plan, process, command.print_progress).run()
    patch = write_patch(folder, plan, sweep)
    if apply is not None and patch.diff:
        with open(apply, "x", encoding="utf-8", newline="") as file:
            file.write(patch.text)
    elif apply is not None:
        print_error(f"--apply: {apply} was not written: the patch changes no line.")
    return command.close(sweep, resume_text(folder), result_lines(sweep, patch))


def _plan(options: argparse.Namespace, words: Sequence[str]) -> TunePlan:
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
    return TunePlan(
        script=script, minutes=options.minutes, variants=variants, **command.numbers(options)
    )


def result_lines(sweep: Mapping[str, Any], patch: Patch) -> list[str]:
    """Return the gain and the patch, then what did not help or was not measured."""
    finished, best = sweep["status"] == "finished", sweep["best"]
    variants = sweep["variants"]
    if not finished and not any(variant["rounds"] for variant in variants):
        return [printable(str(sweep["reason"]))]
    used: list[str] = best["variants"] if finished and best is not None else []
    refused = [variant for variant in variants if variant["verdict"] in ("failed", "impossible")]
    others = [
        variant for variant in variants if variant not in refused and variant["name"] not in used
    ]
    lines = _headline(sweep, patch)
    faster = [one for one in others if finished and one["verdict"] == "faster"]
    slower = [one for one in others if one not in faster]
    titles = {"Faster alone, not in the result:": faster}
    titles["Did not help:" if finished else "Measured so far:"] = slower
    for title, listed in titles.items():
        if listed:
            lines += ["", title, *(_other_line(one, sweep["left_out"]) for one in listed)]
    if refused:
        lines += ["", "Not measured:", *map(_refused_line, refused)]
    # Only a process that uses a GPU has allocated memory there.
    if finished and sweep["baseline"]["metrics"]["peak_allocated"] and "bf16" not in used:
        lines += _by_hand("Not tried", FP16)
    return ["\t".join(map(printable, line.split("\t"))) for line in lines]


def _headline(sweep: Mapping[str, Any], patch: Patch) -> list[str]:
    """Return the result in a sentence, and the patch of a faster combination."""
    best, verdicts = sweep["best"], {variant["verdict"] for variant in sweep["variants"]}
    if sweep["status"] != "finished":
        return [str(sweep["reason"])]
    if best is not None and is_recommended(best):
        return _gain(best, patch)
    if best is not None:
        names = " + ".join(best["variants"])
        return [f"Not confirmed: {names}: {best['text']}; {best['loss']['text']}."]
    if "faster" in verdicts:
        return ["No faster setting keeps the loss."]
    is_open = "undecided" in verdicts
    return ["No setting was shown to be faster yet." if is_open else "No setting pays here."]


def _other_line(variant: Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    reasons = [text for text in (variant["reason"], left_out.get(variant["name"])) if text]
    why = f" ({' '.join(reasons)})" if reasons else ""
    return f"  {variant['name']}: {variant['text']}{why}"


def _refused_line(variant: Mapping[str, Any]) -> str:
    reason = str(variant["reason"])
    if variant["verdict"] == "impossible":  # the reason begins with the setting
        reason = reason.partition(": ")[2]
    return f"  {variant['name']}: {reason}"


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


def _parser() -> argparse.ArgumentParser:
    about = "Find the settings that make a script faster on this machine."
    found = trial_parser("tune", about, EXAMPLES)
    found.add_argument(
        "--minutes",
        metavar="N",
        type=number_type(0.1, 10_000, float),
        default=20.0,
        help="time budget (20)",
    )
    found.add_argument(
        "--settings", metavar="LIST", help='only these, as "tf32,num_workers=2 pin_memory"'
    )
    found.add_argument(
        "--apply", metavar="FILE", type=Path, help="write the patched script to a new file"
    )
    command.add_common(found)
    return found
