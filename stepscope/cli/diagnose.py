"""`stepscope diagnose`: what a run waits for, and what ended it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from stepscope.cli.stacks import show
from stepscope.common.formatting import printable
from stepscope.diagnosis.findings import (
    Finding,
    Recorded,
    findings,
    nothing_to_say,
    read_recorded,
)
from stepscope.distributed.communication_reading import communication_text
from stepscope.recorded_run import open_run
from stepscope.recorder.recovery import recover_ended
from stepscope.run.rank_info import torch_rank
from stepscope.store import StoreError

EXAMPLES = (
    "stepscope diagnose RUN",
    "stepscope diagnose RUN --stacks",
    "stepscope diagnose RUN --json | jq '.[0].next'",
)
OF_SEVERAL = ("straggler", "hang")
"""Findings whose sentences name the ranks."""
_NAMES_RANKS = re.compile(r"(Ranks?|All) \d")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    parser.add_argument(
        "id", metavar="RUN", help="name of the run folder ('stepscope runs'), or its path"
    )
    parser.add_argument(
        "--json", action="store_true", help="a JSON array of findings, and nothing else"
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="of a hang also the Python stacks of the ranks to look at, by py-spy",
    )


def run(options: argparse.Namespace, root: Path) -> int:
    """Print the findings; return 1 where the run cannot be read. Raises RunError."""
    found = open_run(options.id, runs=root).info()
    recover_ended(found)  # the last rows of a killed process
    try:
        recorded = read_recorded(found)
    except StoreError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    said = findings(recorded)
    note = communication_text(found) if recorded.has_steps else None
    if options.json:
        notes = [_note(recorded, note)] if note else []
        print(json.dumps([dataclasses.asdict(one) for one in (*said, *notes)], indent=1))
    for finding in () if options.json else said:
        print(line(finding, several=len(recorded.ranks) > 1))
    if not said:
        print(printable(nothing_to_say(recorded)), file=sys.stderr if options.json else sys.stdout)
    if note and not options.json:
        print(printable(note))
    if options.stacks and not options.json:
        show(found)
    return 0


def _note(recorded: Recorded, text: str) -> Finding:
    """Return what collectives cost as an entry of the kind "note": no problem, nothing to do."""
    return Finding(
        kind="note",
        rank=torch_rank(recorded.ranks[0].run_json, 0),
        phase="communication",
        share=None,
        text=text,
        next=None,
    )


def line(finding: Finding, *, several: bool) -> str:
    """Return a finding in one line; among several ranks it says whose it is, but where it does."""
    tells = finding.kind in OF_SEVERAL or _NAMES_RANKS.match(finding.text) is not None
    whose = "" if tells or not several or finding.rank is None else f"Rank {finding.rank}: "
    text = f"{whose}{finding.text}"
    if finding.next and not text.endswith((".", "!", "?", ":")):
        text += "."
    return printable(f"{text} {finding.next or ''}".rstrip())
