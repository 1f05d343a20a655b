"""A live run, and the commands that were sent to it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from stepscope.run import RunKind, RunStatus
from stepscope.store import STORE_NAME
from stepscope.store.recorder import Recorder


def live_run(folder: Path, **run_info: Any) -> Path:
    """A watched script's run that counts as live until something else is written."""
    folder.mkdir()
    recorder = Recorder(folder, name="train")
    recorder.describe(kind=RunKind.WATCH, commands=["stop", "mark", "pause"])
    recorder.set_status(RunStatus.RUNNING)
    recorder.log(1, {"train/loss": 1.0})
    recorder.close(RunStatus.RUNNING)
    write(folder, status="running", ended=None, **run_info)
    return folder


def write(folder: Path, **run_info: Any) -> None:
    known = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(known | run_info))


def asked(folder: Path) -> list[tuple[int, str, str]]:
    """The id, name and arguments of what was asked of a run."""
    with closing(sqlite3.connect(folder / STORE_NAME)) as connection:
        return connection.execute("SELECT id, name, args FROM commands").fetchall()
