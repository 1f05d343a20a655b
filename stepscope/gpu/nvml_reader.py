"""Read the metrics of one GPU that are due, and drop implausible values.

Counters become rates here. This runs for each GPU ten times a second, so the path of an expected
value is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pynvml

from stepscope.gpu.nvml_device import BINDING_ERRORS, NOT_BY_DRIVER, SLOW_S, Asking, Gpu
from stepscope.gpu.nvml_queries import (
    COUNTERS,
    FIELDS,
    PLAUSIBLE,
    Call,
    Field,
    FieldValue,
    FieldValues,
    Tier,
    Values,
    number_in,
)

WRAP = 2**32
"""PCIe's byte counters "can be wrapped" (nvml.h): some count in 32 bits."""
UNWATCHED_S = 0.25
"""A 32-bit counter that is looked at less often may have wrapped twice: at 34 GB/s it does."""
FASTEST = 2e12
"""B/s that no link reaches: NVLink 5 has 0.9e12 each way."""

ONE_READING = "needs two readings"
MAY_HAVE_WRAPPED = "the counter may wrap between readings this far apart"


def counted(before: int, after: int) -> int | None:
    """Return what a counter counted between two readings; None where it has begun anew.

    A counter that falls while below 2^32 has wrapped there; a larger one was reset.
    """
    if after >= before:
        return after - before
    return after + WRAP - before if before < WRAP else None


@dataclass(slots=True)
class Rate:
    """The mean rate of one counter between two calls of `take`, over the time that really passed.

    `wraps` says that the counter may be one of 32 bits.
    """

    wraps: bool = True
    reason: str | None = ONE_READING
    _last: tuple[float, int] | None = None
    _counted: int = 0
    _seconds: float = 0.0
    _unknown_s: float = 0.0

    @property
    def wide(self) -> bool:
        """Whether the counter has shown that it has more than 32 bits."""
        return self._last is not None and self._last[1] >= WRAP

    def add(self, now: float, counter: int) -> None:
        """Take a reading of the counter at `now` (s)."""
        last, self._last = self._last, (now, counter)
        if last is None or now <= last[0]:
            return
        seconds, before = now - last[0], last[1]
        more = self._between(before, counter, seconds)
        if more is None:
            self._unknown_s += seconds
        else:
            self._counted += more
            self._seconds += seconds

    def begin(self) -> None:
        """Let the next rate be of the time from the latest reading on, whatever was before."""
        self._counted, self._seconds, self._unknown_s = 0, 0.0, 0.0

    def take(self) -> float | None:
        """Return bytes a second since the last call or `begin`; None, with `reason`, if not known.

        It is not known where most of that time is not: the rest may have been another.
        """
        counted, seconds, unknown_s = self._counted, self._seconds, self._unknown_s
        self._counted, self._seconds, self._unknown_s = 0, 0.0, 0.0
        if seconds <= 0 or seconds < unknown_s:
            return None
        self.reason = None
        return float(round(counted / seconds))

    def _between(self, before: int, after: int, seconds: float) -> int | None:
        """Return the counts of one interval, if they can be told."""
        if not self.wraps:
            more = after - before if after >= before else None
        elif max(before, after) < WRAP and seconds > UNWATCHED_S:
            self.reason = MAY_HAVE_WRAPPED
            return None
        else:
            more = counted(before, after)
        if more is None or more > FASTEST * seconds:
            return None
        return more


IMPLAUSIBLE = "implausible value dropped"
DIGITS = 3
"""Of what comes in mW, mJ and ns: milliseconds of throttling; more would only fill the store."""


@dataclass(slots=True)
class _Known:
    """One field of one GPU; `ranges` are key, least and largest plausible value."""

    entry: Field
    tier: Tier
    asking: Asking
    rate: Rate | None
    ranges: tuple[tuple[str, float, float], ...]
    lacking: dict[str, str] = field(default_factory=dict)  # keys without a value -> reason
    last: dict[str, float] = field(default_factory=dict)  # of counters


class _Wanted(NamedTuple):
    """A field value to read, by its number and scope."""

    known: _Known
    reader: FieldValue
    number: tuple[int, int]


class _Plan(NamedTuple):
    """What a read of some tiers does: single calls, then one for all field values."""

    calls: list[tuple[_Known, Call]]
    wanted: list[_Wanted]
    buffer: FieldValues


class GpuValues:
    """Reads the fields of one GPU, which must have been found."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known = [_known(entry) for entry in FIELDS]
        self._plans: dict[tuple[Tier, ...], _Plan] = {}
        self._left_out: frozenset[str] = frozenset()

    def leave_out(self, keys: frozenset[str]) -> None:
        """Do not ask for these rates: somebody else gives them for less."""
        if keys != self._left_out:
            self._left_out = keys
            self._plans.clear()

    def read(self, tiers: tuple[Tier, ...]) -> dict[str, float]:
        """Ask what is due in these tiers; missing values are left out. Never raises NVMLError."""
        plan = self._plans.get(tiers) or self._plan(tiers)
        values: dict[str, float] = {}
        self._calls(plan, values)
        if plan.wanted:
            self._field_values(plan.wanted, plan.buffer, values)
        if Tier.SLOW in tiers:
            values |= self._rates()
        return values

    def begin_rates(self) -> None:
        """Work the next rates out from the latest readings on."""
        for known in self._known:
            if known.rate is not None:
                known.rate.begin()

    def reasons(self) -> dict[str, str]:
        """Say why metrics are missing that were asked for."""
        found: dict[str, str] = {}
        for known in self._known:
            found |= known.lacking
            reason = known.asking.reason
            if reason is not None:
                found |= dict.fromkeys(known.entry.keys, reason)
        return found

    def counted(self) -> set[str]:
        """Return the rates that byte counters give."""
        return {
            known.entry.keys[0]
            for known in self._known
            if known.rate is not None and known.asking.answered and known.rate.reason is None
            if known.entry.keys[0] not in self._left_out
        }

    # --- what to ask

    def _plan(self, tiers: tuple[Tier, ...]) -> _Plan:
        """List what is not refused yet; made anew after each refusal."""
        calls: list[tuple[_Known, Call]] = []
        wanted: list[_Wanted] = []
        for known in self._known:
            if known.tier not in tiers or known.entry.keys[0] in self._left_out:
                continue
            reader = self._supported(known)
            if isinstance(reader, FieldValue):
                wanted.append(self._wanted(known, reader))
            elif reader is not None:
                calls.append((known, reader))
        plan = self._plans[tiers] = _Plan(calls, wanted, _buffer(wanted))
        return plan

    def _supported(self, known: _Known) -> FieldValue | Call | None:
        """Return the reader to use, passing over fields that this driver does not number."""
        asking = known.asking
        while not asking.off:
            reader = known.entry.readers[asking.reader]
            if not isinstance(reader, FieldValue) or reader.id_for(self._gpu.library.major):
                return reader
            asking.unsupported(NOT_BY_DRIVER)
        return None

    def _wanted(self, known: _Known, reader: FieldValue) -> _Wanted:
        number = reader.id_for(self._gpu.library.major)
        return _Wanted(known, reader, (number or 0, reader.scope))

    # --- asking

    def _calls(self, plan: _Plan, values: dict[str, float]) -> None:
        gpu, clock = self._gpu, self._gpu.library.clock
        handle, now = gpu.handle, clock()
        for known, call in plan.calls:
            asking = known.asking
            if now < asking.retry_at or handle is None:
                continue
            begun = now
            try:
                raw = call(handle)
            except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
                self._failed(known, error, values)
                handle, now = gpu.handle, clock()
                continue
            now = clock()
            asking.measure(now - begun)
            asking.rest(now)
            self._answered(asking, now, now - begun)
            self._accept(known, raw, now, values)

    def _field_values(
        self, wanted: list[_Wanted], buffer: FieldValues, values: dict[str, float]
    ) -> None:
        """Read all fields that are due in one call; each has its own return code.

        The first times each is read by itself, to learn what it takes.
        """
        begun = self._gpu.library.clock()
        due = [one for one in wanted if begun >= one.known.asking.retry_at]
        unmeasured = [one for one in due if not one.known.asking.measured]
        for one in unmeasured:
            before = self._gpu.library.clock()
            self._read_fields([one], _buffer([one]), values)
            one.known.asking.measure(self._gpu.library.clock() - before)
        if unmeasured:
            due = [one for one in due if one not in unmeasured]
        if len(due) < len(wanted):
            buffer = _buffer(due)
        if due:
            self._read_fields(due, buffer, values)

    def _read_fields(
        self, due: list[_Wanted], buffer: FieldValues, values: dict[str, float]
    ) -> None:
        gpu = self._gpu
        begun = gpu.library.clock()
        if gpu.handle is None:
            return
        try:
            answers = buffer.read(gpu.handle)
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
            for one in due:
                self._failed(one.known, error, values)
            return
        now = gpu.library.clock()
        for one, answer in zip(due, answers, strict=True):
            known, code = one.known, answer.nvmlReturn
            number = number_in(answer)
            if code != pynvml.NVML_SUCCESS:
                self._failed(known, pynvml.NVMLError(code), values)
            elif number is None:
                known.asking.back_off(now, f"value of the unknown type {answer.valueType}")
            else:
                if known.rate is None:  # a counter that may wrap has to be watched
                    known.asking.rest(now)
                self._answered(known.asking, now, now - begun)
                scaled = round(number * one.reader.scale, DIGITS)
                self._accept(known, (scaled,), now, values)

    def _failed(self, known: _Known, error: Exception, values: dict[str, float]) -> None:
        """Apply the error policy; ask again, or by the next reader, where it says so."""
        asking, before = known.asking, known.asking.reader
        again = self._gpu.failed(asking, error)
        if asking.off or asking.reader != before:
            self._plans.clear()
        reader = self._supported(known) if again else None
        if isinstance(reader, FieldValue):
            if asking.reader != before:
                wanted = [self._wanted(known, reader)]
                self._field_values(wanted, _buffer(wanted), values)
        elif reader is not None:
            self._ask_again(known, values)

    def _ask_again(self, known: _Known, values: dict[str, float]) -> None:
        asking, before = known.asking, known.asking.reader
        calls: Sequence[Any] = known.entry.readers
        raw: Values | None = self._gpu.ask(asking, calls, tries=1)
        if asking.off or asking.reader != before:
            self._plans.clear()
        if raw is not None:
            self._accept(known, raw, self._gpu.library.clock(), values)

    # --- what was answered

    def _answered(self, asking: Asking, now: float, seconds: float) -> None:
        if asking.reason is not None or not asking.answered:
            self._gpu.answered(asking)
        if seconds > SLOW_S or asking.slow_calls:
            asking.took(now, seconds)

    def _accept(self, known: _Known, raw: Values, now: float, values: dict[str, float]) -> None:
        """Keep the plausible values of an answer."""
        if known.rate is not None:
            known.rate.add(now, int(raw[0] or 0))
            if known.tier is Tier.FAST and known.rate.wide:  # need not be watched so closely
                known.tier = Tier.SLOW
                self._plans.clear()
            return
        if known.lacking:
            known.lacking.clear()
        for (key, low, high), value in zip(known.ranges, raw, strict=True):
            if value is None:
                known.lacking[key] = NOT_BY_DRIVER
            elif low <= value <= high and (key not in COUNTERS or _rises(known, key, value)):
                values[key] = float(value)  # NaN is in no range
            else:
                known.lacking[key] = IMPLAUSIBLE

    def _rates(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for known in self._known:
            if known.rate is None or not known.asking.answered:
                continue
            (key,) = known.entry.keys
            if key in self._left_out:
                continue
            value = known.rate.take()
            known.lacking.clear()
            if value is not None:
                values[key] = value
            elif known.rate.reason is not None:
                known.lacking[key] = known.rate.reason
        return values


def _known(entry: Field) -> _Known:
    rate = Rate(wraps=entry.wraps) if entry.rate else None
    ranges = tuple((key, *PLAUSIBLE[key]) for key in entry.keys)
    asking = Asking(", ".join(entry.keys), len(entry.readers))
    return _Known(entry, entry.tier, asking, rate, ranges)


def _buffer(wanted: list[_Wanted]) -> FieldValues:
    return FieldValues([one.number for one in wanted])


def _rises(known: _Known, key: str, value: float) -> bool:
    """Say whether a counter has not fallen: it does when the driver is loaded again."""
    falls = value < known.last.get(key, value)
    known.last[key] = value
    return not falls
