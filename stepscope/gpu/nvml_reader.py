"""Read the metrics of one GPU that are due, drop implausible values and compute rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NvmlDevice
from stepscope.gpu.nvml_queries import KEYS, QUERIES, NvmlQuery, SamplingTier

ONE_READING = "needs two readings"
MAY_WRAP = "the counter may wrap between two readings: it has not exceeded 32 bits"
MAX_32_BITS = 2**32 - 1
IMPLAUSIBLE = "implausible value dropped"
DIGITS = 3  # Of values in mW, mJ and ns: milliseconds of throttling; more only fill the store.

_BY_TIER = {tier: tuple(query for query in QUERIES if query.tier is tier) for tier in SamplingTier}


class NvmlReader:
    """Makes the queries of the table for one GPU or MIG instance."""

    def __init__(self, device: NvmlDevice) -> None:
        self._device = device
        self._due: dict[NvmlQuery, float] = {}
        self._reasons: dict[str, str] = {}
        self._counters: dict[NvmlQuery, tuple[float, float]] = {}  # Time and last number.

    def read(
        self, tiers: Collection[SamplingTier], omitted: Collection[str] = ()
    ) -> dict[str, float]:
        """Return the values that are due in these tiers, without the `omitted` metrics."""
        values: dict[str, float] = {}
        now = self._device.library.clock()
        for query in itertools.chain.from_iterable(_BY_TIER[tier] for tier in tiers):
            if now < self._due.get(query, -math.inf) or not query.metrics.keys().isdisjoint(
                omitted
            ):
                continue
            answer = self._device.query(query.calls)
            if answer is None:
                reason = self._device.reason(query.calls)
                self._reasons |= dict.fromkeys(query.metrics, str(reason))
                continue
            if query.period_s:
                self._due[query] = now + query.period_s
            numbers = answer if isinstance(answer, tuple) else (answer,)
            for key, number in zip(query.metrics, numbers, strict=True):
                self._convert(query, key, number, values)
        return values

    def reasons(self) -> dict[str, str]:
        """Return the reasons for missing metrics that were queried, by key."""
        if self._device.lost is not None:
            return dict.fromkeys(KEYS, self._device.lost)
        return self._reasons

    def _convert(
        self, query: NvmlQuery, key: str, number: float | None, values: dict[str, float]
    ) -> None:
        """Add the value of a metric in stored units, or the reason why it is missing."""
        reason = NOT_BY_DRIVER
        if number is not None and query.is_rate:
            number, reason = self._rate(query, number)
        if number is not None:
            low, high = query.metrics[key]
            value = round(number * query.scale, DIGITS) if query.scale != 1 else float(number)
            if low <= value <= high:  # not NaN, which is in no range
                values[key] = value
                self._reasons.pop(key, None)
                return
            reason = IMPLAUSIBLE
        self._reasons[key] = reason

    def _rate(self, query: NvmlQuery, number: float) -> tuple[float | None, str]:
        """Return the increase per second since the last reading, or None and the reason."""
        if query.may_wrap and number <= MAX_32_BITS:
            return None, MAY_WRAP
        now = self._device.library.clock()
        before, last = self._counters.get(query, (now, number))
        self._counters[query] = now, number
        if now <= before:
            return None, ONE_READING
        return round((number - last) / (now - before)), IMPLAUSIBLE
