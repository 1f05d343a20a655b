"""A run folder with the files of several ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from stepscope.run import new_run_folder, process_identity, rank_json, write_run_json

GONE_PID = 2**22 + 1


class RankFolder:
    """A folder with the run_json of some of the ranks of a job; `base` is common to all."""

    def __init__(self, root: Path, **base: Any) -> None:
        self.folder = new_run_folder(root, "job")
        self.base = base

    def rank(self, number: int, status: str = "running", **more: Any) -> None:
        now = time.time()
        values = {"status": status, "heartbeat": now, "rank": number, **process_identity()}
        values |= self.base | more
        write_run_json(self.folder, values, rank_json(number))
        os.utime(self.folder / rank_json(number), (more.get("heartbeat", now),) * 2)
