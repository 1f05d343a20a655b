"""`stepscope diagnose`: print a run's bottleneck and the cause of its end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from stepscope.cli import CommandError
from stepscope.cli.arguments import add_json
from stepscope.cli.named_runs import add_run, named_runs
from stepscope.common.formatting import printable
from stepscope.diagnosis.code_time import TABLE, line_shares, table_note
from stepscope.diagnosis.findings import (
    Finding,
    RunData,
    findings,
    nothing_to_say,
    read_recorded,
)
from stepscope.store import StoreError

EXAMPLES = ("stepscope diagnose RUN", "stepscope diagnose RUN --json | jq '.[0].next'")
OF_JOB = ("straggler", "hang")  # findings whose sentences name the ranks
_NAMES_RANKS = re.compile(r"(Ranks?|All) \d")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_run(parser)
    add_json(parser, "print only a JSON array of findings")


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the findings. Raises CommandError if the run cannot be read, and RunError."""
    [info] = named_runs([options.runs], root)
    try:
        recorded = read_recorded(info)
    except StoreError as error:
        raise CommandError(str(error)) from error
    results = findings(recorded)
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in results], indent=1))
    else:
        for finding in results:
            print(line(finding, is_job=len(recorded.ranks) > 1))
        print_lines(recorded)
    if not results:
        print(printable(nothing_to_say(recorded)), file=sys.stderr if options.json else sys.stdout)
    return 0


def print_lines(recorded: RunData) -> None:
    """Print where the time of the first process goes, by line of the script."""
    facts = recorded.ranks[0].facts
    rows = [] if facts is None else line_shares(facts)
    if facts is None or not rows:
        return
    print(f"\n{TABLE}: {table_note(facts)}")
    for row in rows:
        share, phase, place, call, below = row.cells
        print(printable(f"{share:>10}  {phase:<10} {place}  {call}  {below}".rstrip()))


def line(finding: Finding, *, is_job: bool) -> str:
    """Return a finding in one line; in a job with its rank, if the sentence names none."""
    text = finding.text
    is_named = finding.kind in OF_JOB or _NAMES_RANKS.match(text) is not None
    if is_job and finding.rank is not None and not is_named:
        text = f"Rank {finding.rank}: {text}"
    if finding.next and not text.endswith((".", "!", "?", ":")):
        text += "."
    return printable(f"{text} {finding.next or ''}".rstrip())
