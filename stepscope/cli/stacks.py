"""Python stacks of the ranks that a hang names, by py-spy: also of threads that keep the GIL."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

from stepscope.common.formatting import printable
from stepscope.distributed.hangs.hang_reading import hang_of
from stepscope.run import RunInfo, process_of, read_only_reason
from stepscope.run.rank_status import RankStanding, rank_states

RANKS = 4
"""Ranks that are looked at: the first ones to look at."""
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


def _stack(run: RunInfo, standing: RankStanding | None, program: str | None) -> str:
    told = standing.run_json if standing is not None else None
    if told is None:
        return "it has written nothing."
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


def show(run: RunInfo) -> None:
    """Print the stacks."""
    for text in stacks(run):
        print(text, file=sys.stdout)
