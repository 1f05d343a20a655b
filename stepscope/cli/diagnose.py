"""`stepscope diagnose`: print what a run waits for, what ended it, and Python stacks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from stepscope.common.formatting import printable
from stepscope.diagnosis.findings import Finding, findings, nothing_to_say, read_recorded
from stepscope.distributed.communication import communication_text
from stepscope.distributed.hangs.diagnose import hang_of
from stepscope.recorded_run import open_run
from stepscope.recorder.recovery import recover_ended
from stepscope.run import RunInfo, process_of, read_only_reason
from stepscope.run.rank_info import torch_rank
from stepscope.run.rank_status import RankInfo, rank_states
from stepscope.store import StoreError

RANKS = 4  # Ranks that are looked at: the first ones to look at.
TIMEOUT_S = 20.0


def stacks(run: RunInfo) -> Iterator[str]:
    """Yield the stacks of the ranks of a hang, or the commands that show them, as text.

    Only processes of this host and user are looked at, and only if they are those that the run
    names: a number is used again.
    """
    found = hang_of(run)
    if found is None:
        yield "No hang: there is no rank whose stack would tell more."
        return
    program = shutil.which("py-spy")
    standings = {one.rank: one for one in rank_states(run.folder)}
    for rank in found.ranks[:RANKS]:
        yield f"Rank {rank}: {_stack(run, standings.get(rank), program)}"


def _stack(run: RunInfo, standing: RankInfo | None, program: str | None) -> str:
    told = standing.run_json if standing is not None else None
    if told is None:
        return "nothing recorded."
    theirs = RunInfo(run.folder, run.status, None, 0.0, told)
    pid = process.pid if (process := process_of(told)) is not None else None
    if read_only_reason(theirs) is not None:
        return f"on {told.get('host')}, run py-spy dump --pid {told.get('pid')}"
    if pid is None:
        return "its process is gone."
    if program is None:
        return f"py-spy is not installed (pip install py-spy). Then: py-spy dump --pid {pid}"
    command = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy could not look at process {pid}: {type(error).__name__}."
    said = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    return "\n".join(map(printable, said.decode("utf-8", "replace").splitlines()))


EXAMPLES = (
    "stepscope diagnose RUN",
    "stepscope diagnose RUN --stacks",
    "stepscope diagnose RUN --json | jq '.[0].next'",
)
OF_SEVERAL = ("straggler", "hang")  # Findings whose sentences name the ranks.
_NAMES_RANKS = re.compile(r"(Ranks?|All) \d")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    parser.add_argument(
        "id", metavar="RUN", help="name of the run folder ('stepscope runs'), or its path"
    )
    parser.add_argument("--json", action="store_true", help="print only a JSON array of findings")
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="for a hang, also print Python stacks of the ranks in question (py-spy)",
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
        rank = torch_rank(recorded.ranks[0].run_json, 0)
        notes = [Finding(kind="note", rank=rank, phase="communication", text=note)] if note else []
        print(json.dumps([dataclasses.asdict(one) for one in (*said, *notes)], indent=1))
    for finding in () if options.json else said:
        print(line(finding, several=len(recorded.ranks) > 1))
    if not said:
        print(printable(nothing_to_say(recorded)), file=sys.stderr if options.json else sys.stdout)
    if note and not options.json:
        print(printable(note))
    if options.stacks and not options.json:
        for text in stacks(found):
            print(text, flush=True)  # each takes up to 20 s
    return 0


def line(finding: Finding, *, several: bool) -> str:
    """Return a finding in one line; among several ranks it says whose it is, but where it does."""
    tells = finding.kind in OF_SEVERAL or _NAMES_RANKS.match(finding.text) is not None
    whose = "" if tells or not several or finding.rank is None else f"Rank {finding.rank}: "
    text = f"{whose}{finding.text}"
    if finding.next and not text.endswith((".", "!", "?", ":")):
        text += "."
    return printable(f"{text} {finding.next or ''}".rstrip())
