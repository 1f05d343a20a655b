"""What the commands of all sweeps share: exit codes, options, progress, the last lines."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.common.config_issue import ConfigError
from stepscope.common.formatting import format_duration, printable
from stepscope.lab.folder import INTERRUPTED, SweepError
from stepscope.lab.gate import Gate, parse_gate
from stepscope.lab.plan import SweepPlan, estimate
from stepscope.lab.revision import RevisionError
from stepscope.lab.trial_process import TrialProcess
from stepscope.lab.verdict_text import closing, progress_line, table

FINISHED, FAILED, USAGE, STOPPED = 0, 1, 2, 130


class UsageError(Exception):
    """Options that describe no sweep; the message has a remedy."""


def print_error(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")


def add_numbers(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add = parser.add_argument
    add("--no-combination", action="store_true", help="skip the search for the best combination")


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(no_combination=False)
    add = parser.add_argument
    add("--steps", metavar="N", type=int, help="measured steps per trial (automatic)")
    add("--warmup", metavar="N", type=int, help="warm-up steps (a quarter, at least 10)")
    add("--max-rounds", metavar="N", type=int, help="maximum number of rounds (12)")
    add("--folder", metavar="DIR", help="folder for the results, new or to resume")


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Add `--gate`, which may be repeated."""
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        type=_gate,
        metavar="METRIC:+P%",
        help="exit code 4 if METRIC (step_time, peak_memory, energy) rises by more than P%%",
    )


def _gate(text: str) -> Gate:
    try:
        return parse_gate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def numbers(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a plan that the options of `add_numbers` set."""
    given = {name: getattr(options, name) for name in ("steps", "warmup", "max_rounds")}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("steps") == 1:
        raise UsageError("--steps: must be at least 2, got 1. Omit it for an automatic number.")
    return given | {"find_best": not options.no_combination}


def exit_code(sweep: Callable[[TrialProcess], int], module: str) -> int:
    """Return the exit code of a sweep with processes of `module`; print why it cannot run."""
    process = TrialProcess(module)
    for number in (signal.SIGINT, signal.SIGTERM):  # also before the sweep starts
        signal.signal(number, lambda *_: process.stop())
    try:
        return sweep(process)
    except (UsageError, ConfigError, SweepError, RevisionError) as error:
        print_error(str(error))
        return USAGE
    except OSError as error:
        print_error(f"The folder of the sweep or a result cannot be written: {error}.")
        return FAILED


def print_estimate(folder: Path, plan: SweepPlan) -> None:
    """Print the folder and the expected duration of a sweep."""
    shortest, longest = map(format_duration, estimate(plan))
    count = len(plan.variants)
    print_error(
        f"{folder}: {count} variant{'' if count == 1 else 's'}; about {shortest} if all are "
        f"decided at the first look, otherwise {longest}."
    )


def print_progress(sweep: Mapping[str, Any]) -> None:
    print_error(progress_line(sweep))


def close(
    sweep: Mapping[str, Any], resume: str, lines: Sequence[str] = (), *, gates: bool = False
) -> int:
    """Print the results; return the exit code. `resume` is the command for the rest.

    `lines` replace the table, which is on stderr if stdout has Markdown of `gates`.
    """
    lines = lines or [*table(sweep), "", *closing(sweep)]
    out = sys.stderr if gates else sys.stdout
    out.write("\n".join(lines) + "\n")
    if sweep["status"] == "stopped":
        print_error(f"To resume: {resume}")
        return STOPPED if sweep["reason"] == INTERRUPTED else FAILED
    return FINISHED if sweep["status"] == "finished" else FAILED
