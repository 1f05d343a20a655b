"""A sweep.json as the lab writes it, in the middle of a sweep and at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.config import RunConfig, Workload

Json = dict[str, Any]

FILE = Path(__file__).parents[1] / "data" / "running_sweep.json"
RECORDED: Json = json.loads(FILE.read_text())
VARIANTS: list[Json] = RECORDED["variants"]
BEST: Json = RECORDED["best"]


def metrics(rate: float, **others: float | None) -> Json:
    """Return the metrics of the baseline at another rate."""
    known: Json = RECORDED["baseline"]["metrics"]
    return known | {"samples_per_sec": rate, "step_time": 128 / rate} | others


def variant(name: str, verdict: str, effect: float | None = None, **others: Any) -> Json:
    """Return a variant, which has been measured if its effect is known."""
    found: Json = next(one for one in VARIANTS if (one["effect"] is None) == (effect is None))
    found = found | {"name": name, "label": f"{name} on", "verdict": verdict, "reason": None}
    if effect is not None:
        found |= {"effect": effect, "low": effect - 0.02, "high": effect + 0.02}
    return found | others


def sweep(status: str = "finished", **others: Any) -> Json:
    """Return a sweep over VARIANTS on a CPU with these entries instead of its own."""
    found: Json = json.loads(FILE.read_text())  # tests change it
    config = RunConfig(workload=Workload.DIGITS_MLP, channels_last=False)
    found["plan"]["config"] = config.to_dict()
    return found | {"status": status, "best": None} | others
