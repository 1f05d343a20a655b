"""How many times as fast several devices are, and how much of them is used; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config import Parallel, RunConfig
from trainer.lab.variants import changed


def scaled(
    config: RunConfig, changes: Mapping[str, Any], verdict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `scaling` and the `text` with it, for an arm on another number of devices.

    Speed-up is the ratio of the samples per second of all devices together; efficiency is that per
    device. Both have the interval of the verdict. Empty for other arms.
    """
    arm = changed(config, changes)
    devices = _devices(arm) / _devices(config)
    if not {"parallel", "ranks"} & changes.keys():
        return {}
    ends = [verdict["effect"], verdict["low"], verdict["high"]]
    if any(end is None for end in ends):
        return {"scaling": {"devices": _devices(arm), "speed_up": None, "efficiency": None}}
    speed, low, high = (1 + end for end in ends)
    efficient = [end / devices for end in (speed, low, high)]
    scaling = {
        "devices": _devices(arm),
        "speed_up": speed,
        "speed_up_low": low,
        "speed_up_high": high,
        "efficiency": efficient[0],
        "efficiency_low": efficient[1],
        "efficiency_high": efficient[2],
    }
    words = (
        f"{speed:.2f} times as fast [{low:.2f}, {high:.2f}], efficiency "
        f"{100 * efficient[0]:.0f} % [{100 * efficient[1]:.0f}, {100 * efficient[2]:.0f}]"
    )
    return {"scaling": scaling, "text": f"{verdict['text']}; {words}"}


def _devices(config: RunConfig) -> int:
    return 1 if config.parallel is Parallel.NONE else config.ranks * config.nodes
