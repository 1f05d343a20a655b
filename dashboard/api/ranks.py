"""`/api/ranks`: the ranks of a job, from what the server keeps of it for all tabs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dashboard.ranks.rank_cache import RankCache
from dashboard.ranks.ranks_response import RanksRequest, answer
from dashboard.run_look import recent
from stepscope.run import RunInfo, read_run
from stepscope.run.rank_info import UNREADABLE, read_rank_file

KEPT = 4  # Runs whose ranks are kept: some hundred kB each.


class Jobs:
    """The jobs that tabs look at; may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[tuple[Path, float], RankCache] = OrderedDict()

    def of(self, run: RunInfo) -> RankCache:
        """Return what is kept of a run; nothing of another run that had its folder before."""
        key = run.folder, run.created
        with self._lock:
            return recent(self._jobs, key, lambda: RankCache(run), KEPT)


def ranks_answer(
    jobs: Jobs,
    folder: Path,
    question: RanksRequest,
    judge: Callable[[RunInfo], dict[str, Any]] = lambda _run: {"verdict": None},
) -> dict[str, Any]:
    """Return the answer for a run; `judge` gives what is said of its ranks. Raises RunError."""
    run = _first_rank(folder)
    job = jobs.of(run)
    said = {} if question.only_strips else judge(run)
    with job.lock:
        if not question.only_strips or job.unread:
            job.look()
        return answer(job, run, question, said)


def _first_rank(folder: Path) -> RunInfo:
    """Return rank 0 alone as the run: to judge all ranks would read all their files each time."""
    try:
        file = read_rank_file(folder, 0)
        float(file.run_json["created"])
    except UNREADABLE:
        return read_run(folder)  # which says what is wrong
    return RunInfo(folder, file.status, None, file.age_s, file.run_json)
