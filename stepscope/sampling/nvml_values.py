"""The metrics of one GPU: asks what is due, drops what cannot be true, says what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pynvml

from stepscope.sampling.asking import NOT_BY_DRIVER, Asking
from stepscope.sampling.nvml_fields import (
    COUNTERS,
    FIELDS,
    PLAUSIBLE,
    Call,
    Field,
    FieldValue,
    Tier,
    Values,
)
from stepscope.sampling.nvml_gpu import BINDING_ERRORS, Gpu
from stepscope.sampling.rates import Rate

IMPLAUSIBLE = "implausible value dropped"


@dataclass(slots=True)
class _Known:
    """One field of one GPU."""

    entry: Field
    asking: Asking
    rate: Rate | None
    lacking: dict[str, str] = field(default_factory=dict)  # keys without a value -> reason
    last: dict[str, float] = field(default_factory=dict)  # of counters


class _Wanted(NamedTuple):
    """A field value to read, by its number and scope."""

    known: _Known
    reader: FieldValue
    number: tuple[int, int]


class _Plan(NamedTuple):
    """What a read of some tiers does: single calls, then one for all field values."""

    calls: list[_Known]
    values: list[_Wanted]


class GpuValues:
    """Reads the fields of one GPU, which must have been found."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known = [_known(entry) for entry in FIELDS]
        self._plans: dict[tuple[Tier, ...], _Plan] = {}

    def read(self, tiers: tuple[Tier, ...]) -> dict[str, float]:
        """Ask what is due in these tiers; missing values are left out. Never raises NVMLError."""
        plan = self._plans.get(tiers) or self._plan(tiers)
        values: dict[str, float] = {}
        for known in plan.calls:
            values |= self._call(known)
        if plan.values:
            values |= self._field_values(plan.values)
        if Tier.SLOW in tiers:
            values |= self._rates()
        return values

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
        }

    def _plan(self, tiers: tuple[Tier, ...]) -> _Plan:
        """List what is not refused yet; made anew after each refusal."""
        calls: list[_Known] = []
        values: list[_Wanted] = []
        for known in self._known:
            if known.entry.tier not in tiers:
                continue
            reader = self._supported(known)
            if isinstance(reader, FieldValue):
                values.append(self._wanted(known, reader))
            elif reader is not None:
                calls.append(known)
        plan = self._plans[tiers] = _Plan(calls, values)
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

    def _call(self, known: _Known) -> dict[str, float]:
        asking, before = known.asking, known.asking.reader
        calls: Sequence[Any] = known.entry.readers
        raw: Values | None = self._gpu.ask(asking, calls)
        if asking.off or asking.reader != before:
            self._plans.clear()
        return {} if raw is None else self._accept(known, raw)

    def _field_values(self, wanted: list[_Wanted]) -> dict[str, float]:
        """Read all fields that are due in one call; each has its own return code."""
        gpu = self._gpu
        begun = gpu.library.clock()
        due = [one for one in wanted if begun >= one.known.asking.retry_at]
        if not due or gpu.handle is None:
            return {}
        try:
            answers = pynvml.nvmlDeviceGetFieldValues(gpu.handle, [one.number for one in due])
        except pynvml.NVMLError as error:
            return self._refused([one.known for one in due], error)
        except (pynvml.NVMLLibraryMismatchError, *BINDING_ERRORS) as error:
            for one in due:
                one.known.asking.back_off(begun, f"{type(error).__name__}: {error}")
            return {}
        now = gpu.library.clock()
        values: dict[str, float] = {}
        for (known, reader, _), answer in zip(due, answers, strict=True):
            if answer.nvmlReturn != pynvml.NVML_SUCCESS:
                values |= self._refused([known], pynvml.NVMLError(answer.nvmlReturn))
                continue
            number = _number(answer)
            if number is None:
                known.asking.back_off(now, f"value of the unknown type {answer.valueType}")
                continue
            gpu.answered(known.asking)
            known.asking.took(now, now - begun)
            values |= self._accept(known, (number * reader.scale,))
        return values

    def _refused(self, fields: list[_Known], error: Any) -> dict[str, float]:
        """Apply the error policy to fields; where another call can be asked, ask it at once."""
        values: dict[str, float] = {}
        for known in fields:
            before = known.asking.reader
            self._gpu.failed(known.asking, error)
            if known.asking.off or known.asking.reader != before:
                self._plans.clear()
            reader = self._supported(known) if known.asking.reader != before else None
            if isinstance(reader, FieldValue):
                values |= self._field_values([self._wanted(known, reader)])
            elif reader is not None:
                values |= self._call(known)
        return values

    def _accept(self, known: _Known, raw: Values) -> dict[str, float]:
        """Keep the plausible values of an answer."""
        if known.rate is not None:
            known.rate.add(self._gpu.library.clock(), int(raw[0] or 0))
            return {}
        values: dict[str, float] = {}
        known.lacking.clear()
        for key, value in zip(known.entry.keys, raw, strict=True):
            if value is None:
                known.lacking[key] = NOT_BY_DRIVER
            elif self._plausible(known, key, value):
                values[key] = float(value)
            else:
                known.lacking[key] = IMPLAUSIBLE
        return values

    def _plausible(self, known: _Known, key: str, value: float) -> bool:
        low, high = PLAUSIBLE[key]
        if not low <= value <= high:  # NaN too
            return False
        if key not in COUNTERS:
            return True
        falls = value < known.last.get(key, value)  # the driver was loaded again
        known.last[key] = value
        return not falls

    def _rates(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for known in self._known:
            if known.rate is None or not known.asking.answered:
                continue
            (key,) = known.entry.keys
            value = known.rate.take()
            known.lacking.clear()
            if value is not None:
                values[key] = value
            elif known.rate.reason is not None:
                known.lacking[key] = known.rate.reason
        return values


def _known(entry: Field) -> _Known:
    rate = Rate(wraps=entry.wraps) if entry.rate else None
    return _Known(entry, Asking(", ".join(entry.keys), len(entry.readers)), rate)


def _number(answer: Any) -> float | None:
    """Return the member of the union that the answer's type names; None for an unknown type."""
    member = _MEMBERS.get(answer.valueType)
    return None if member is None else getattr(answer.value, member)


# nvmlValueType_t: double, unsigned int, long, long long, signed long long, int, unsigned short.
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
