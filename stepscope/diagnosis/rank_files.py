"""What the other processes of a run say of themselves: rankK.json beside run.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.run import RunInfo, rank_json


def rank_numbers(run: RunInfo) -> list[int]:
    """Return the numbers of all processes that the folder knows, 0 first."""
    return [0, *sorted(_others(run))]


def rank_info(run: RunInfo, number: int) -> dict[str, Any]:
    """Return what a process says of itself; settings and the like are in run.json alone."""
    if number == 0:
        return run.run_json
    try:
        own = json.loads((run.folder / rank_json(number)).read_text())
    except (OSError, ValueError):
        own = {}
    shared = {key: run.run_json.get(key) for key in ("kind", "config", "environment")}
    return shared | (own if isinstance(own, dict) else {})


def torch_rank(run_json: Mapping[str, Any], number: int) -> int:
    """Return torch's number of a process, its own in the folder where it says none."""
    rank = run_json.get("rank")
    return rank if type(rank) is int else number


def _others(run: RunInfo) -> Iterator[int]:
    for path in run.folder.glob("rank*.json"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal() and int(number):
            yield int(number)
