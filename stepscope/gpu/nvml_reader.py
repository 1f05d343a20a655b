"""Read the due metrics of one GPU at 10 Hz, drop implausible values and compute rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

from stepscope.gpu import nvml_queries
from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NvmlDevice, QueryState, driver_errors
from stepscope.gpu.nvml_queries import FieldValueReader, NvmlQuery, QueryValues, SamplingTier

WRAP = 2**32  # PCIe's byte counters "can be wrapped" (nvml.h): some have 32 bits.
UNWATCHED_S = 0.25  # Maximum interval for a 32-bit counter: at 34 GB/s it wraps twice within.

ONE_READING = "needs two readings"
MAY_HAVE_WRAPPED = "the counter may wrap between readings this far apart"
IMPLAUSIBLE = "implausible value dropped"
DIGITS = 3  # Of values in mW, mJ and ns: milliseconds of throttling; more only fill the store.


@dataclass(slots=True)
class CounterRate:
    """Mean rate of a counter between calls of `take`; with `wraps` it may have 32 bits."""

    wraps: bool = True
    reason: str | None = ONE_READING
    _last: tuple[float, int] | None = None
    _counted: int = 0
    _seconds: float = 0.0

    @property
    def wide(self) -> bool:
        """True if the counter has exceeded 32 bits."""
        return self._last is not None and self._last[1] >= WRAP

    def add(self, now: float, counter: int) -> None:
        """Add a reading of the counter at `now` (s)."""
        last, self._last = self._last, (now, counter)
        if last is None or now <= last[0]:
            return
        seconds, more = now - last[0], counter - last[1]
        if self.wraps and max(last[1], counter) < WRAP:
            if seconds > UNWATCHED_S:
                self.reason = MAY_HAVE_WRAPPED
                return
            more %= WRAP
        if 0 <= more <= nvml_queries.FASTEST * seconds:  # a counter that decreases was reset
            self._counted += more
            self._seconds += seconds

    def take(self) -> float | None:
        """Return bytes/s since the last call; None, with `reason`, if unknown."""
        counted, seconds = self._counted, self._seconds
        self._counted, self._seconds = 0, 0.0
        if seconds <= 0:
            return None
        self.reason = None
        return float(round(counted / seconds))


@dataclass(slots=True)
class _Known:
    """State of one query of one GPU."""

    entry: NvmlQuery
    tier: SamplingTier
    asking: QueryState
    rate: CounterRate | None
    lacking: dict[str, str] = field(default_factory=dict)  # Key without a value -> reason.
    last: dict[str, float] = field(default_factory=dict)  # Of counters.


class NvmlReader:
    """Makes the queries of one GPU, whose handle must have been acquired."""

    def __init__(self, gpu: NvmlDevice) -> None:
        self._gpu = gpu
        self._known = [
            _Known(
                entry,
                entry.tier,
                QueryState(", ".join(entry.keys), len(entry.readers), entry.rest_s),
                CounterRate(wraps=entry.wraps) if entry.rate else None,
            )
            for entry in nvml_queries.FIELDS
        ]
        self.left_out: frozenset[str] = frozenset()  # Rates not read, as GPM is cheaper.

    def read(self, tiers: tuple[SamplingTier, ...]) -> dict[str, float]:
        """Return the values that are due in these tiers. Never raises NVMLError."""
        values: dict[str, float] = {}
        now = self._gpu.library.clock()
        fields = []
        for known in self._known:
            if known.tier not in tiers or now < known.asking.retry_at or self._is_left_out(known):
                continue
            reader = self._reader(known)
            if isinstance(reader, FieldValueReader):
                fields.append((known, reader))
            elif reader is not None:
                self._call(known, values)
        self._read_fields(fields, values)
        if SamplingTier.SLOW in tiers:
            self._take_rates(values)
        return values

    def reasons(self) -> dict[str, str]:
        """Return the reasons for missing metrics that were queried, by key."""
        reasons: dict[str, str] = {}
        for known in self._known:
            reasons |= known.lacking
            if known.asking.reason is not None:
                reasons |= dict.fromkeys(known.entry.keys, known.asking.reason)
        return reasons

    def counted(self) -> set[str]:
        """Return the rates that are known from byte counters."""
        return {
            known.entry.keys[0]
            for known in self._known
            if known.rate is not None and known.asking.answered and known.rate.reason is None
            if not self._is_left_out(known)
        }

    def _is_left_out(self, known: _Known) -> bool:
        return known.entry.keys[0] in self.left_out

    def _reader(self, known: _Known) -> Any:
        """Return the selected reader, skipping fields that this driver does not have."""
        asking = known.asking
        while not asking.off:
            reader = known.entry.readers[asking.reader]
            if not isinstance(reader, FieldValueReader) or reader.id_for(self._gpu.library.major):
                return reader
            asking.unsupported(NOT_BY_DRIVER)
        return None

    def _call(self, known: _Known, values: dict[str, float]) -> None:
        calls: Sequence[Any] = known.entry.readers  # no field value follows a call
        raw: QueryValues | None = self._gpu.ask(known.asking, calls)
        if raw is not None:
            self._accept(known, raw, values)

    def _read_fields(
        self, due: Sequence[tuple[_Known, FieldValueReader]], values: dict[str, float]
    ) -> None:
        """Read field values in one call; each has a separate return code."""
        gpu = self._gpu
        if not due or gpu.handle is None:
            return
        begun = gpu.library.clock()
        numbers = [(reader.id_for(gpu.library.major), reader.scope) for _, reader in due]
        try:
            answers = pynvml.nvmlDeviceGetFieldValues(gpu.handle, numbers)
        except driver_errors() as error:
            for known, _ in due:
                self._failed(known, error, values)
            return
        for (known, reader), answer in zip(due, answers, strict=True):
            try:
                number = nvml_queries.number_in(answer)
                if number is None:
                    raise ValueError(f"value of the unknown type {answer.valueType}")
            except (pynvml.NVMLError, ValueError) as error:
                self._failed(known, error, values)
            else:
                gpu.answered(known.asking, begun)
                self._accept(known, (round(number * reader.scale, DIGITS),), values)

    def _failed(self, known: _Known, error: Exception, values: dict[str, float]) -> None:
        """Apply the error policy; try the next reader, if any, immediately."""
        if self._gpu.failed(known.asking, error):
            reader = self._reader(known)
            if isinstance(reader, FieldValueReader):
                self._read_fields([(known, reader)], values)
            elif reader is not None:
                self._call(known, values)

    def _accept(self, known: _Known, raw: QueryValues, values: dict[str, float]) -> None:
        if known.rate is not None:
            known.rate.add(self._gpu.library.clock(), int(raw[0] or 0))
            if known.rate.wide:  # no wraparound within a second
                known.tier = SamplingTier.SLOW
            return
        known.lacking.clear()
        for key, value in zip(known.entry.keys, raw, strict=True):
            low, high = nvml_queries.PLAUSIBLE[key]
            if value is None:
                known.lacking[key] = NOT_BY_DRIVER
            elif low <= value <= high and _rises(known, key, value):
                values[key] = float(value)  # not NaN, which is in no range
            else:
                known.lacking[key] = IMPLAUSIBLE

    def _take_rates(self, values: dict[str, float]) -> None:
        for known in self._known:
            if known.rate is None or not known.asking.answered or self._is_left_out(known):
                continue
            (key,) = known.entry.keys
            value = known.rate.take()
            known.lacking.clear()
            if value is not None:
                values[key] = value
            elif known.rate.reason is not None:
                known.lacking[key] = known.rate.reason


def _rises(known: _Known, key: str, value: float) -> bool:
    """Return False for a counter that decreased, as at a reload of the driver."""
    if key not in nvml_queries.COUNTERS:
        return True
    falls = value < known.last.get(key, value)
    known.last[key] = value
    return not falls
