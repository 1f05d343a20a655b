"""`stepscope diagnose`: print a run's bottleneck, the cause of its end, and Python stacks."""

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

from stepscope.cli import CommandError
from stepscope.common.formatting import printable
from stepscope.diagnosis.findings import Finding, findings, nothing_to_say, read_recorded
from stepscope.distributed.hangs.diagnose import hang_of
from stepscope.recorded_run import open_run
from stepscope.run import RunInfo, is_own, process_of
from stepscope.run.rank_status import RankInfo, rank_states
from stepscope.store import StoreError
from stepscope.store.recovery import recover_ended

RANKS = 4  # maximum number of ranks whose stacks are printed
TIMEOUT_S = 20.0


def stacks(run: RunInfo) -> Iterator[str]:
    """Yield the stacks of the ranks of a hang, or the commands that print them, as text.

    Reads only processes of this host and user that the run identifies: pids are reused.
    """
    hang = hang_of(run)
    if hang is None:
        yield "No hang: no rank needs its stack examined."
        return
    ranks = {info.rank: info for info in rank_states(run.folder)}
    for rank in hang.ranks[:RANKS]:
        yield f"Rank {rank}: {_stack(run, ranks.get(rank))}"


def _stack(run: RunInfo, rank: RankInfo | None) -> str:
    run_json = rank.run_json if rank is not None else None
    if run_json is None:
        return "nothing recorded."
    if not is_own(RunInfo(run.folder, run.status, None, 0.0, run_json)):
        return f"on {run_json.get('host')}, run py-spy dump --pid {run_json.get('pid')}"
    process, program = process_of(run_json), shutil.which("py-spy")
    if process is None:
        return "its process is gone."
    pid = process.pid
    if program is None:
        return f"py-spy is not installed (pip install py-spy). Then: py-spy dump --pid {pid}"
    command = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy could not read process {pid}: {type(error).__name__}."
    output = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    return "\n".join(map(printable, output.decode("utf-8", "replace").splitlines()))


EXAMPLES = (
    "stepscope diagnose RUN",
    "stepscope diagnose RUN --stacks",
    "stepscope diagnose RUN --json | jq '.[0].next'",
)
OF_SEVERAL = ("straggler", "hang")  # findings whose sentences name the ranks
_NAMES_RANKS = re.compile(r"(Ranks?|All) \d")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
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
    """Print the findings. Raises CommandError if the run cannot be read, and RunError."""
    info = open_run(options.id, runs=root).info()
    recover_ended(info)  # the last rows of a killed process
    try:
        recorded = read_recorded(info)
    except StoreError as error:
        raise CommandError(str(error)) from error
    results = findings(recorded)
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in results], indent=1))
    for finding in () if options.json else results:
        print(line(finding, several=len(recorded.ranks) > 1))
    if not results:
        print(printable(nothing_to_say(recorded)), file=sys.stderr if options.json else sys.stdout)
    if options.stacks and not options.json:
        for text in stacks(info):
            print(text, flush=True)  # each takes up to 20 s
    return 0


def line(finding: Finding, *, several: bool) -> str:
    """Return a finding in one line, with its rank if there are several and no rank is named."""
    is_named = finding.kind in OF_SEVERAL or _NAMES_RANKS.match(finding.text) is not None
    rank = "" if is_named or not several or finding.rank is None else f"Rank {finding.rank}: "
    text = f"{rank}{finding.text}"
    if finding.next and not text.endswith((".", "!", "?", ":")):
        text += "."
    return printable(f"{text} {finding.next or ''}".rstrip())
