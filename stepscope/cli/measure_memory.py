"""`stepscope measure-memory`: run a script's first steps and report the headroom for its batch.

The script is the `__main__` of this process, as under `stepscope watch`; its output goes to stderr,
so that stdout has only the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stepscope.cli.arguments import add_json, number_type, script_parser
from stepscope.common.formatting import format_bytes, printable
from stepscope.run.status import RunOutcome, outcome
from stepscope.watch.memory_probe import (
    StepMemoryProbe,
    batch_headroom,
    device_name,
    largest_step,
)
from stepscope.watch.script import (
    Script,
    ScriptNotFoundError,
    exit_without_handlers,
    from_file,
    from_module,
    split_options,
)

DONE, FAILED = 0, 1
STEPS = 3
EXAMPLES = (
    "stepscope measure-memory train.py --batch-size 64",
    "stepscope measure-memory --steps 5 --json train.py",
    "stepscope measure-memory -m package.train --lr 0.1",
)


def main(argv: Sequence[str]) -> int:
    """Run the script in `argv` until its first steps are measured; return the exit code."""
    options, words = _parse(argv)
    try:
        script = (from_module if options.module else from_file)(words[0], words[1:])
    except ScriptNotFoundError as error:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return error.code
    results = os.fdopen(os.dup(1), "w", errors="backslashreplace")
    sys.stdout.flush()
    os.dup2(2, 1)

    def report(ended: RunOutcome | None) -> None:
        print(_report(probe, ended, as_json=options.json), file=results, flush=True)

    def end() -> NoReturn:
        report(None)
        exit_without_handlers(DONE if probe.refused is None else FAILED)

    probe = StepMemoryProbe(options.steps, end)
    probe.start()
    ended = _run(script)
    if ended.failure != "oom":
        text = f"The script ended before its steps were measured. {ended.reason or ''}"
        sys.stderr.write(f"{printable(text.strip())}\n")
    report(ended)
    return FAILED


def _run(script: Script) -> RunOutcome:
    """Run the script; return how it ended before its steps were measured."""
    try:
        script.run()
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - of the script
        return outcome(error)
    return RunOutcome()


def _report(probe: StepMemoryProbe, ended: RunOutcome | None, *, as_json: bool) -> str:
    """Return the result as lines of text, or as a JSON object."""
    fits = None if ended is not None or probe.refused is not None else True
    if ended is not None and ended.failure == "oom":
        fits = False
        factor, text = None, f"Does not fit: {ended.reason}"
    elif probe.refused is not None or not probe.steps:
        no_step = "its optimizer made no step" if probe.has_torch else "it did not import torch"
        factor, text = None, probe.refused or f"The script cannot be measured: {no_step}."
    else:
        factor, text = batch_headroom(probe.steps)
    largest = largest_step(probe.steps) if probe.steps else None
    parts = largest.parts() if largest is not None else {}
    if as_json:
        values = {
            "fits": fits,
            "steps": len(probe.steps),
            "parts": parts,
            "batch_factor": factor,
            "text": text,
            "measured_peak_bytes": None,
            "measured_reserved_bytes": None,
            "free_bytes": None,
            "available_bytes": None,
        }
        if largest is not None:
            values |= {
                "measured_peak_bytes": largest.used.peak,
                "measured_reserved_bytes": largest.used.peak_reserved,
                "free_bytes": largest.free,
                "available_bytes": largest.available,
            }
        return json.dumps(values, indent=1)
    if largest is None:
        return printable(text)
    peak, reserved = largest.used.peak, largest.used.peak_reserved
    beside = "" if reserved is None else f" allocated, {format_bytes(reserved)} reserved"
    share = f", {peak / largest.available:.0%} of the available memory"
    rows = (f"  {name.replace('_', ' '):<26} {format_bytes(n):>10}" for name, n in parts.items())
    return "\n".join(
        (
            f"Measured {len(probe.steps)} steps on {printable(device_name(largest.cuda_index))}.",
            f"Peak: {format_bytes(peak)}{beside}{share}",
            *rows,
            printable(text),
        )
    )


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    about = (
        "Run a script's first optimizer steps, end it, and report their memory and how much larger "
        "the batch can be. Option --workload NAME first: measure a built-in workload."
    )
    parser = script_parser("measure-memory", about, EXAMPLES)
    parser.add_argument(
        "--steps",
        type=number_type(2, 100, int),
        default=STEPS,
        metavar="N",
        help=f"steps to measure ({STEPS})",
    )
    add_json(parser, "print one JSON object")
    return split_options(parser, argv)
