"""The largest batch size that fits, and the smallest that is nearly the fastest, by probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepscope.common.formatting import three_digits
from trainer.config import RunConfig, limits_of
from trainer.memory_estimate import ProbeError

HEADROOM = 0.10  # Fraction of the available memory that a recommended batch leaves free.
NEAR_BEST = 0.05  # Largest loss of throughput for a smaller batch, which needs less memory.
BISECTIONS = 3  # Below the first size that does not fit: the limit is exact to an eighth.
MAX_STEP_S = 10.0  # Sizes with a longer step, extrapolated from the size before, are not measured.

Probe = Mapping[str, Any]  # The result of `probe.measure`.


def find_batch_sizes(config: RunConfig, measure: Callable[[int], Probe]) -> dict[str, Any]:
    """Measure sizes from the configured one on: doubled until one does not fit, then bisected.

    If the configured size does not fit, it is halved instead. Returns JSON values. Raises
    ProbeError if the first probe fails; a later failure ends the search with its reason.
    """
    search = _Search(config, measure)
    try:
        search.run()
    except ProbeError as error:
        if not search.probes:
            raise
        search.limit = f"The search ended: {error}"
    probes = [search.probes[size] for size in sorted(search.probes)]
    largest = max((size for size, probe in search.probes.items() if probe["fits"]), default=None)
    recommended, reason = recommended_size(probes)
    return {
        "points": probes,
        "largest": largest,
        "recommended": recommended,
        "why": f"{search.limit} {reason}".strip(),
    }


class _Search:
    """The probes by batch size; `limit` is why no larger size was measured."""

    def __init__(self, config: RunConfig, measure: Callable[[int], Probe]) -> None:
        self.probes: dict[int, Probe] = {}
        self.limit = ""
        self._config = config
        self._measure = measure

    def run(self) -> None:
        """Search, and set `limit`. Raises ProbeError."""
        fitting, failing = self._config.batch_size, None
        while not self._fits(fitting):
            failing, fitting = fitting, fitting // 2
            if not fitting:
                self.limit = "Not even batch size 1 fits."
                return
        while failing is None:
            larger = self._next_size(fitting)
            if larger is None:
                return
            if self._fits(larger):
                fitting = larger
            else:
                failing = larger
        for _ in range(BISECTIONS):
            middle = (fitting + failing) // 2
            if middle == fitting:
                break
            if self._fits(middle):
                fitting = middle
            else:
                failing = middle
        self.limit = f"{fitting:,} fits, {failing:,} does not."

    def _fits(self, size: int) -> bool:
        self.probes[size] = self._measure(size)
        return bool(self.probes[size]["fits"])

    def _next_size(self, size: int) -> int | None:
        """Return the size after one that fits; None, with `limit` set, if it is not measured."""
        probe = self.probes[size]
        samples = probe["samples"] // self._config.gradient_accumulation_steps
        most = min(samples, int(limits_of("batch_size")[1]))
        step_s = 2 * probe["step_s"]
        if size >= most:
            self.limit = f"{size:,} fits, and an epoch has no larger batch."
        elif step_s > MAX_STEP_S:
            self.limit = (
                f"{size:,} fits. {2 * size:,} was not measured: a step would take about "
                f"{step_s:.0f} s."
            )
        else:
            return int(min(2 * size, most))
        return None


def recommended_size(probes: Sequence[Probe]) -> tuple[int | None, str]:
    """Return the knee of the throughput, and why; None if it is unknown.

    The knee is the smallest size that is nearly as fast as the fastest one, among those that leave
    a tenth of the available memory free.
    """
    rates = {
        probe["batch_size"]: probe["samples_per_sec"]
        for probe in probes
        if probe["fits"] and _has_headroom(probe)
    }
    if not rates:
        return None, "No size is recommended: none leaves 10% of the memory free."
    if None in rates.values():
        return None, "No size is recommended: a simulated GPU has no real speed."
    fastest = max(rates, key=lambda size: rates[size])
    knee = min(size for size, rate in rates.items() if rate >= (1 - NEAR_BEST) * rates[fastest])
    text = f"{fastest:,} is the fastest with 10% of the memory free"
    text += f" ({three_digits(rates[fastest])} samples/s)"
    if knee == fastest:
        return knee, f"{text}."
    loss = 1 - rates[knee] / rates[fastest]
    return knee, f"{text}; {knee:,} is only {loss:.0%} slower."


def _has_headroom(probe: Probe) -> bool:
    reserved = probe["measured_reserved_bytes"]
    taken = probe["measured_peak_bytes"] if reserved is None else reserved
    return bool(probe["free_bytes"] >= HEADROOM * (probe["free_bytes"] + taken))
