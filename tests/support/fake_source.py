"""A connection to another host whose state a test sets, and whose runs a test writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.remote.source import ConnectionState, RemoteSource
from stepscope.run import write_run_json

CONNECTED = ConnectionState(connected=True, delay_s=0.034)
LOST = replace(CONNECTED, connected=False, text="ssh: Connection refused.", retry_at=1e9)
LABEL = "login1:/scratch/runs"


class FakeSource(RemoteSource):
    """Receives only the metadata of the runs that `receive` is given, at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.label = LABEL
        self.now = CONNECTED
        self.wanted: list[str] = []
        self.open = False

    def start(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False

    def state(self) -> ConnectionState:
        return self.now

    def want(self, run_id: str) -> None:
        self.wanted.append(run_id)

    def receive(self, run: Path, *names: str, **mirror: Any) -> Path:
        """Put run.json of a run, and further files, into the mirror, as the source does."""
        folder = self.folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        content = json.loads((run / "run.json").read_text())
        received = {"source": LABEL, "age_s": 0.5, "alive": None, "received": 0.0, "reason": None}
        content["mirror"] = received | mirror
        write_run_json(folder, content, durable=False)
        for name in names:
            shutil.copy(run / name, folder / name)
        return folder
