"""What a run has recorded, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.run import RunInfo
from stepscope.store import EventRow, SeriesBlock, StoreReader
from stepscope.store.reader import send_command
from tests.support.waiting import wait_for


def block_of(
    folder: Path, stream: str = "steps", source: str | None = None, rank: int = 0
) -> SeriesBlock:
    """All rows of a series, the first one of its stream without a source."""
    with StoreReader(folder, rank) as reader:
        found = (one for one in reader.series() if one.stream == stream)
        info = next(one for one in found if source in (None, one.source))
        return reader.read(info.id, 0, info.rows, 1)


def metric(folder: Path, key: str, stream: str = "steps", rank: int = 0) -> np.ndarray:
    """All values of a metric, gaps left out."""
    block = block_of(folder, stream, rank=rank)
    values = block.mean[block.keys.index(key)]
    recorded: np.ndarray = values[~np.isnan(values)]
    return recorded


def events(folder: Path, rank: int = 0) -> list[EventRow]:
    with StoreReader(folder, rank) as reader:
        return reader.events(limit=10_000)


def run_json(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return loaded


def answer_to(folder: Path, command_id: int, rank: int = 0, timeout_s: float = 60.0) -> EventRow:
    """Wait until a rank has done or refused a command, and return its event."""

    def found() -> EventRow | None:
        stored = (event for event in events(folder, rank))
        return next((event for event in stored if event.data.get("command_id") == command_id), None)

    answer: EventRow = wait_for(found, timeout_s)
    return answer


def ask(folder: Path, name: str, **args: Any) -> EventRow:
    """Send a command to a run and return its answer."""
    return answer_to(folder, send_command(folder, name, args))


def event_of(folder: Path, kind: str) -> EventRow:
    found: EventRow = wait_for(
        lambda: next((event for event in events(folder) if event.kind == kind), None)
    )
    return found


def values(run: RunInfo) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of every metric of the run's steps."""
    block = block_of(run.folder)
    return {
        key: [
            (int(step), float(value))
            for step, value in zip(block.step, row, strict=True)
            if not np.isnan(value)
        ]
        for key, row in zip(block.keys, block.mean, strict=True)
    }


def steps_of(folder: Path, rank: int = 0) -> int:
    with StoreReader(folder, rank) as reader:
        return sum(info.rows for info in reader.series() if info.stream == "steps")


def alerts(folder: Path) -> list[EventRow]:
    return [event for event in events(folder) if event.kind == "alert"]


def steps_and_losses(folder: Path) -> tuple[list[float], list[float]]:
    block = block_of(folder)
    return block.step.tolist(), block.mean[block.keys.index("train/loss")].tolist()
