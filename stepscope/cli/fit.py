"""`stepscope fit`: runs a script's first optimizer steps and says how much larger a batch may be.

The script is the `__main__` of this process, as under `stepscope watch`; what it prints goes to
standard error, so that standard output has the result alone.
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
from stepscope.common.formatting import format_bytes, printable
from stepscope.memory.batch_headroom import FitReport, report
from stepscope.watch.memory_probe import MeasurementDone, StepMemoryProbe
from stepscope.watch.script import Script, ScriptNotFoundError, from_file, from_module

DONE, FAILED, USAGE = 0, 1, 2
STEPS = 3
EXAMPLES = (
    "stepscope fit train.py --batch-size 64",
    "stepscope fit --steps 5 --json train.py",
    "stepscope fit -m package.train --lr 0.1",
)


def main(argv: Sequence[str]) -> int:
    """Run the script that `argv` names until its first steps are measured; return the exit code."""
    options, words = _parse(argv)
    try:
        script = (from_module if options.module else from_file)(words[0], words[1:])
    except ScriptNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return error.code
    results = os.fdopen(os.dup(1), "w", errors="backslashreplace")
    sys.stdout.flush()
    os.dup2(2, 1)

    def tell() -> None:
        _tell(report(steps.steps, _why_none(steps)), steps, options.json, results)

    steps = StepMemoryProbe(options.steps, tell)
    steps.start()
    ended_by = _run(script)
    if ended_by is not None:
        sys.stderr.write(
            printable(f"The script ended before its steps were measured: {ended_by}") + "\n"
        )
    tell()
    return DONE if len(steps.steps) >= options.steps and steps.refused is None else FAILED


def _run(script: Script) -> str | None:
    """Run it; return what ended it too early."""
    try:
        script.run()
    except MeasurementDone:
        return None
    except SystemExit as error:
        return f"exit code {error.code}"
    except KeyboardInterrupt:
        return "Ctrl-C"
    except Exception as error:  # noqa: BLE001 - the script's own: it is told, and what was measured as well
        first = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {first}"
    return None


def _why_none(steps: StepMemoryProbe) -> str:
    if steps.refused is not None:
        return steps.refused
    if not steps.has_torch:
        return "No step seen: the script did not import torch."
    return "No step seen: no torch optimizer stepped in this process."


def _tell(found: FitReport, steps: StepMemoryProbe, as_json: bool, out: TextIO) -> None:
    if steps.refused is not None:
        found = FitReport(text=steps.refused, factor=None, parts=found.parts, peak=found.peak)
    kind = steps.steps[-1].device if steps.steps else None
    if as_json:
        device = {"device": kind and kind.kind, "device_name": kind and kind.name}
        text = json.dumps({**found.to_json(), "steps": len(steps.steps), **device}, indent=1)
    else:
        text = "\n".join(_lines(found, len(steps.steps), None if kind is None else kind.name))
    print(text, file=out, flush=True)


def _lines(found: FitReport, count: int, name: str | None) -> list[str]:
    if found.peak is None or name is None:
        return [printable(found.text)]
    share = "" if not found.room else f", {100 * found.peak / found.room:.0f} % of what it can have"
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
    parser.add_argument(
        "--steps",
        type=number_type(2, 100, int),
        default=STEPS,
        metavar="N",
        help=f"steps to measure ({STEPS})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, like python -m"
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Refuse a command without a script: `stepscope.cli.main` hands all others to `main`."""
    print("stepscope fit: which script? Name a file, or a module after -m.", file=sys.stderr)
    return USAGE


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split our options from the script and all that follows it, which is the script's."""
    parser = argparse.ArgumentParser(
        prog="stepscope fit",
        usage="%(prog)s [--steps N] [--json] (script.py | -m module) [arguments]",
        description="Run a script's first optimizer steps, stop it, and report their memory "
        "use and how much larger a batch would fit.",
        epilog="\n  ".join(("examples:", *EXAMPLES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    ours = 0
    while ours < len(argv) and argv[ours].startswith("-"):
        word = argv[ours]
        ours += 2 if word == "--steps" else 1
        if word in ("-m", "--"):
            break
    options = parser.parse_args([word for word in argv[:ours] if word != "--"])
    if ours >= len(argv):
        parser.error("which script? Name a file, or a module after -m.")
    return options, list(argv[ours:])
