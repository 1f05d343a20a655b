"""A real torchrun job of tests/scripts/hanging.py, watched, in which rank 1 hangs."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

from stepscope.distributed.hangs.cases import Hang
from stepscope.distributed.hangs.diagnose import hang_of
from stepscope.run import read_run
from tests.support.jobs import PATIENCE_S, SCRIPTS, Job, started
from tests.support.waiting import wait_for

NAMED_S = 15.0
"""Longest time from the last step to the name of the rank."""


def named_hang(job: Job) -> Hang:
    """Wait until the hang is named; fail where that takes longer than NAMED_S."""
    found: Hang = wait_for(lambda: hang_of(read_run(job.folder)), PATIENCE_S)
    assert time.time() - found.since < NAMED_S + 1, found.text
    return found


def hanging(
    what: str, folder: Path, *, ranks: int = 2, backend: str = "gloo", **environ: str
) -> AbstractContextManager[Job]:
    """Run the job until the end of the block; nothing of it is left, stopped ranks included."""
    watch = ["-m", "stepscope.watch", "--runs", str(folder / "runs")]
    return started(folder, ranks, [*watch, str(SCRIPTS / "hanging.py"), what, backend], **environ)
