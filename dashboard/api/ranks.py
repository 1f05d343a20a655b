"""`/api/ranks`: the ranks of a job, from a cache shared by all tabs."""

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

MAX_JOBS = 4  # cached jobs of some hundred kB each


class Jobs:
    """Cached jobs of the open tabs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[tuple[Path, float], RankCache] = OrderedDict()

    def of(self, run: RunInfo) -> RankCache:
        """Return the cache of a run; a new run in the same folder has its own."""
        key = run.folder, run.created
        with self._lock:
            return recent(self._jobs, key, lambda: RankCache(run), MAX_JOBS)


def ranks_answer(
    jobs: Jobs,
    folder: Path,
    question: RanksRequest,
    judge: Callable[[RunInfo], dict[str, Any]] = lambda _run: {"verdict": None},
) -> dict[str, Any]:
    """Return the answer for a run; `judge` returns the verdict on its ranks. Raises RunError."""
    run = _first_rank(folder)
    job = jobs.of(run)
    verdict = {} if question.only_strips else judge(run)
    with job.lock:
        if not question.only_strips or job.unread:
            job.look()
        return answer(job, run, question, verdict)


def _first_rank(folder: Path) -> RunInfo:
    """Return the run from the file of rank 0 alone, without reading the other ranks' files."""
    try:
        file = read_rank_file(folder, 0)
        float(file.run_json["created"])
    except UNREADABLE:
        return read_run(folder)  # raises RunError with the reason
    return RunInfo(folder, file.status, None, file.age_s, file.run_json)
