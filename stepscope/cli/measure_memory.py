"""`stepscope measure-memory`: run a script's first steps and report the headroom for its batch.

The script is the `__main__` of this process, as under `stepscope watch`; its output goes to stderr,
so that stdout has only the result. With `--workload` or `--config` the process becomes
`python -m trainer.memory_estimate`, which predicts instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from stepscope.cli import number_type
from stepscope.cli.app_process import become_program
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.batch_headroom import FitReport, report
from stepscope.watch.memory_probe import MeasurementDone, StepMemoryProbe
from stepscope.watch.script import (
    Script,
    ScriptNotFoundError,
    from_file,
    from_module,
    split_options,
)

DONE, FAILED, USAGE = 0, 1, 2
STEPS = 3
NO_SCRIPT = "Name a script, a module after -m, or --workload NAME."
EXAMPLES = (
    "stepscope measure-memory train.py --batch-size 64",
    "stepscope measure-memory --steps 5 --json train.py",
    "stepscope measure-memory -m package.train --lr 0.1",
    "stepscope measure-memory --workload gpt --batch-size 64    predicts, without a run",
)


def main(argv: Sequence[str]) -> int:
    """Run the script in `argv` until its first steps are measured; return the exit code."""
    first = next((word for word in argv if word != "--json"), "")
    if first.partition("=")[0] in ("--workload", "--config"):
        return become_program("trainer.memory_estimate", argv)
    options, words = _parse(argv)
    try:
        script = (from_module if options.module else from_file)(words[0], words[1:])
    except ScriptNotFoundError as error:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        return error.code
    results = os.fdopen(os.dup(1), "w", errors="backslashreplace")
    sys.stdout.flush()
    os.dup2(2, 1)

    def print_report() -> None:
        _print(report(probe.steps, _why_none(probe)), probe, options.json, results)

    probe = StepMemoryProbe(options.steps, print_report)
    probe.start()
    ended_by = _run(script)
    if ended_by is not None:
        text = f"The script ended before its steps were measured: {ended_by}"
        sys.stderr.write(f"{printable(text)}\n")
    print_report()
    return DONE if len(probe.steps) >= options.steps and probe.refused is None else FAILED


def _run(script: Script) -> str | None:
    """Run the script; return what ended it before its steps were measured."""
    try:
        script.run()
    except MeasurementDone:
        return None
    except SystemExit as error:
        return f"exit code {error.code}"
    except KeyboardInterrupt:
        return "Ctrl-C"
    except Exception as error:  # noqa: BLE001 - any error of the script, reported with the result
        first = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {first}"
    return None


def _why_none(probe: StepMemoryProbe) -> str:
    if probe.refused is not None:
        return probe.refused
    if not probe.has_torch:
        return "No step seen: the script did not import torch."
    return "No step seen: no torch optimizer stepped in this process."


def _print(found: FitReport, probe: StepMemoryProbe, as_json: bool, out: TextIO) -> None:
    if probe.refused is not None:
        found = FitReport(text=probe.refused, factor=None, parts=found.parts, peak=found.peak)
    kind = probe.steps[-1].device if probe.steps else None
    if as_json:
        device = {"device": kind and kind.kind, "device_name": kind and kind.name}
        text = json.dumps({**found.to_json(), "steps": len(probe.steps), **device}, indent=1)
    else:
        text = "\n".join(_lines(found, len(probe.steps), None if kind is None else kind.name))
    print(text, file=out, flush=True)


def _lines(found: FitReport, count: int, name: str | None) -> list[str]:
    if found.peak is None or name is None:
        return [printable(found.text)]
    share = f", {100 * found.peak / found.room:.0f}% of the available memory" if found.room else ""
    reserved = f" allocated, {format_bytes(found.reserved)} reserved" if found.reserved else ""
    return [
        f"{count} steps measured on {printable(name)}.",
        f"Peak: {format_bytes(found.peak)}{reserved}{share}",
        *(
            f"  {part.replace('_', ' '):<26} {format_bytes(n):>10}"
            for part, n in found.parts.items()
        ),
        printable(found.text),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, which come before the script."""
    add = parser.add_argument
    steps = number_type(2, 100, int)
    add("--steps", type=steps, default=STEPS, metavar="N", help=f"steps to measure ({STEPS})")
    add("--json", action="store_true", help="print one JSON object")
    add("-m", dest="module", action="store_true", help="run a module, like python -m")
    add("--workload", metavar="NAME", help="predict for a workload of the dashboard instead")


def run(options: argparse.Namespace, root: Path) -> int:
    """Return USAGE: `stepscope.cli.main` calls `main` for a command with a script."""
    print(f"stepscope measure-memory: no script. {NO_SCRIPT}", file=sys.stderr)
    return USAGE


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="stepscope measure-memory",
        usage="%(prog)s [--steps N] [--json] (script.py | -m module) [arguments]\n"
        "       %(prog)s [--json] --workload NAME [settings]",
        description="Run a script's first optimizer steps, stop it, and report their memory "
        "use and how much larger a batch would fit.",
        epilog="\n  ".join(("examples:", *EXAMPLES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    options, words = split_options(parser, argv)
    if options.workload is not None:
        parser.error("--workload must come first, and replaces the script.")
    if not words:
        parser.error(f"no script. {NO_SCRIPT}")
    return options, words
