"""Energy of a window of the devices stream: from the GPU's counter, else from its power."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Series = Sequence[float | None] | NDArray[np.float64]

_SHORTEST_S = 2.0  # the counter itself moves only about every 100 ms
_LONGEST_GAP_S = 1.0


def energy_joules(ts: Series, power: Series, energy_counter: Series) -> tuple[float | None, str]:
    """Return (joules, how) of one GPU over the window `ts` (s): board energy, all processes.

    `power` (W) and `energy_counter` (J) run along `ts`, NaN or None where missing. `how` is
    "counter", "power" (trapezoid), or the reason why there is no number.
    """
    times, watts, counter = (np.asarray(a, dtype=np.float64) for a in (ts, power, energy_counter))
    if times.size < 2 or times[-1] - times[0] < _SHORTEST_S:
        return None, "too short"
    delta = _counter_delta(times, counter)
    if delta is not None:
        return delta, "counter"
    integral = _integral(times, watts)
    if integral is not None:
        return integral, "power"
    return None, "no energy counter, and power has gaps over 1 s"


def _counter_delta(times: NDArray[np.float64], counter: NDArray[np.float64]) -> float | None:
    """Return end minus start, if both lie near the window's ends and no reset lies between."""
    known = ~np.isnan(counter)
    if known.sum() < 2 or (np.diff(counter[known]) < 0).any():
        return None
    at = times[known]
    if max(at[0] - times[0], times[-1] - at[-1]) > _LONGEST_GAP_S:
        return None
    return float(counter[known][-1] - counter[known][0])


def _integral(times: NDArray[np.float64], watts: NDArray[np.float64]) -> float | None:
    known = ~np.isnan(watts)
    at, values = times[known], watts[known]
    if at.size < 2 or np.diff(at, prepend=times[0], append=times[-1]).max() > _LONGEST_GAP_S:
        return None
    return float((np.diff(at) * (values[1:] + values[:-1]) / 2).sum())
