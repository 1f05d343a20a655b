"""What a command in a job of several ranks waits for, in words; pure."""

from __future__ import annotations

from typing import Any

from stepscope.run import RunInfo

ROUND_S = 5
"""The sentence changes this often: a screen reader says it anew each time."""
NAMED = 8
"""Ranks that are named at most."""


def command_wait(run: RunInfo, now: float) -> str | None:
    """Say which ranks have not come to the step of a command; None while all come.

    >>> from pathlib import Path
    >>> from stepscope.run import RunStatus
    >>> waits = {"name": "pause", "step": 13, "since": 100.0, "ranks": [1]}
    >>> run_json = {"command_waits": waits, "world_size": 4}
    >>> run = RunInfo(Path("run"), RunStatus.RUNNING, None, 0.0, run_json)
    >>> command_wait(run, 112.0)
    'Pause waits for step 13: rank 1 has not come for 10 s.'
    """
    waits = run.run_json.get("command_waits")
    if not run.status.live or not isinstance(waits, dict):
        return None
    try:
        label = str(waits["name"]).replace("_", " ").capitalize()
        since, step, ranks = float(waits["since"]), int(waits["step"]), list(waits["ranks"])
    except (KeyError, TypeError, ValueError):
        return None
    waited_s = max(ROUND_S, int(now - since) // ROUND_S * ROUND_S)
    who = _who(ranks, run.run_json.get("world_size"))
    return f"{label} is waiting for step {step:,}: {who} arrived after {waited_s:,} s."


def _who(ranks: list[Any], world_size: Any) -> str:
    if len(ranks) == world_size:
        return "no rank has"
    listed = ", ".join(map(str, ranks[:NAMED])) + (", …" if len(ranks) > NAMED else "")
    return f"rank {listed} has not" if len(ranks) == 1 else f"ranks {listed} have not"
