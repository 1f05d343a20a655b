"""The table of NVML queries (key, call, unit, valid range, tier), and their reader for one GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pynvml

from stepscope.gpu.nvml_device import NOT_BY_DRIVER, NvmlDevice, nvml_call

ONE_READING = "needs two readings"
MAY_WRAP = "the counter may wrap between two readings: it has not exceeded 32 bits"
MAX_32_BITS = 2**32 - 1
IMPLAUSIBLE = "implausible value dropped"
DIGITS = 3  # Of values in mW, mJ and ns: milliseconds of throttling; more only fill the store.

MILLI = 1e-3
NANO = 1e-9
KIB = 1024
ALL_LINKS = 2**32 - 1  # Scope of an NVLink field for the sum over all links.


class SamplingTier(StrEnum):
    """Sampling rate: about 10 Hz, 2 Hz, 1 Hz and 0.1 Hz."""

    FAST = "fast"
    MEDIUM = "medium"
    SLOW = "slow"
    RARE = "rare"


FAST, MEDIUM, SLOW, RARE = SamplingTier
Range = tuple[float, float]  # Minimum and maximum of a metric; others are sentinels or invalid.


@dataclass(frozen=True, slots=True, eq=False)
class NvmlQuery:
    """One query: its metrics with their ranges, and `calls` in the order of preference.

    A call returns one number, or one for each metric, None for a missing one. `is_rate`: the number
    is a byte counter, which for `may_wrap` may have 32 bits. `period_s`: minimum period, for calls
    that take a millisecond or more (docs/gpu/h100.md).
    """

    tier: SamplingTier
    metrics: dict[str, Range]
    calls: tuple[Callable[[Any], Any], ...]
    scale: float = 1.0
    is_rate: bool = False
    may_wrap: bool = False
    period_s: float = 0.0


def _utilization(handle: Any) -> tuple[float, float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory_used(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def _memory_used_v1(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)  # with the driver's reserve


def _memory_total(handle: Any) -> tuple[float, float]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.total, memory.reserved


def _memory_total_v1(handle: Any) -> tuple[float, None]:
    return memory_total(handle), None


def memory_total(handle: Any) -> int:
    """Return the installed bytes; every driver has this call."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def _remapped_rows(handle: Any) -> tuple[float, ...]:
    corrected, uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return corrected + uncorrected, pending, failed


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""nvmlValueType_t: the types are numbered in the order of the union's members (nvml.h)."""


def field_value(handle: Any, number: int, scope: int = 0) -> float:
    """Return the value of an NVML field. Raises NVMLError, or IndexError for an unknown type."""
    (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:  # A field can fail in a successful call.
        raise pynvml.NVMLError(answer.nvmlReturn)
    return float(getattr(answer.value, _MEMBERS[answer.valueType]))


def field_call(number: int, scope: int = 0) -> Callable[[Any], float]:
    """Return a call for a field with the same number in every driver."""
    return lambda handle: field_value(handle, number, scope)


def _throttle_time(number: int) -> Callable[[Any], float]:
    """Return a call for the time of a throttle reason.

    R580 has renumbered these fields: an older driver returns another quantity for the number.
    """

    def call(handle: Any) -> float:
        major = pynvml.nvmlSystemGetDriverVersion().partition(".")[0]
        if not major.isdecimal() or int(major) < 580:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return field_value(handle, number)

    return call


def _ecc_errors(kind: str) -> tuple[Callable[[Any], Any]]:
    error_type = f"NVML_MEMORY_ERROR_TYPE_{kind}"
    return (nvml_call("nvmlDeviceGetTotalEccErrors", error_type, "NVML_VOLATILE_ECC"),)


PERCENT = (0.0, 100.0)
BYTES = (0.0, 2.0**50)
WATTS = (0.0, 10_000.0)
MEGAHERTZ = (0.0, 100_000.0)
SECONDS = (0.0, 1e9)  # 30 years.
COUNT = (0.0, 2.0**53)
FLAG = (0.0, 1.0)
BYTES_PER_SECOND = (0.0, 2e12)  # Above any interconnect: NVLink 5 has 0.9e12 per direction.

QUERIES = (
    NvmlQuery(FAST, {"gpu/util": PERCENT, "gpu/mem_util": PERCENT}, (_utilization,)),
    NvmlQuery(FAST, {"gpu/mem_used": BYTES}, (_memory_used, _memory_used_v1)),
    NvmlQuery(
        FAST,
        {"gpu/power": WATTS},
        (field_call(186), nvml_call("nvmlDeviceGetPowerUsage")),  # POWER_INSTANT
        scale=MILLI,
    ),
    NvmlQuery(
        MEDIUM, {"gpu/sm_clock": MEGAHERTZ}, (nvml_call("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),)
    ),
    NvmlQuery(
        MEDIUM,
        {"gpu/throttle_reasons": (0, 2**32 - 2)},
        (
            nvml_call("nvmlDeviceGetCurrentClocksEventReasons"),
            nvml_call("nvmlDeviceGetCurrentClocksThrottleReasons"),
        ),
    ),
    NvmlQuery(
        MEDIUM,
        {"gpu/temp": (-50, 200)},
        (
            nvml_call("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
            nvml_call("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        ),
    ),
    # MEMORY_TEMP; GPUs without this sensor return 0.
    NvmlQuery(MEDIUM, {"gpu/temp_mem": (1, 200)}, (field_call(82),)),
    NvmlQuery(
        MEDIUM,
        {"gpu/temp_margin": (-200, 200)},
        (nvml_call("nvmlDeviceGetMarginTemperature"),),
        period_s=5.0,
    ),
    NvmlQuery(
        MEDIUM,
        {"gpu/mem_clock": MEGAHERTZ},
        (nvml_call("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),),
    ),
    NvmlQuery(
        MEDIUM,
        {"gpu/energy": (0, 1e13)},  # 10 kW for 30 years
        # TOTAL_ENERGY_CONSUMPTION
        (field_call(83), nvml_call("nvmlDeviceGetTotalEnergyConsumption")),
        scale=MILLI,
        period_s=2.0,  # runs of some seconds need two readings
    ),
    NvmlQuery(SLOW, {"gpu/throttle_power": SECONDS}, (field_call(74),), scale=NANO),
    NvmlQuery(SLOW, {"gpu/throttle_sw_thermal": SECONDS}, (_throttle_time(269),), scale=NANO),
    NvmlQuery(SLOW, {"gpu/throttle_hw_thermal": SECONDS}, (_throttle_time(270),), scale=NANO),
    NvmlQuery(SLOW, {"gpu/throttle_brake": SECONDS}, (_throttle_time(271),), scale=NANO),
    NvmlQuery(
        SLOW,
        {"gpu/mem_total": (1, 2**50), "gpu/mem_reserved": BYTES},
        (_memory_total, _memory_total_v1),
    ),
    NvmlQuery(
        SLOW,
        {"gpu/power_limit": (1, 10_000)},
        (nvml_call("nvmlDeviceGetEnforcedPowerLimit"),),
        scale=MILLI,
    ),
    NvmlQuery(SLOW, {"gpu/fan": (0, 1000)}, (nvml_call("nvmlDeviceGetFanSpeed"),)),
    # PCIE_COUNT_TX_BYTES and RX
    NvmlQuery(
        SLOW, {"gpu/pcie_tx": BYTES_PER_SECOND}, (field_call(197),), is_rate=True, may_wrap=True
    ),
    NvmlQuery(
        SLOW, {"gpu/pcie_rx": BYTES_PER_SECOND}, (field_call(198),), is_rate=True, may_wrap=True
    ),
    # NVLINK_THROUGHPUT_DATA_TX and RX, and those of NVLink 5
    NvmlQuery(
        SLOW,
        {"gpu/nvlink_tx": BYTES_PER_SECOND},
        (field_call(138, ALL_LINKS), field_call(202, ALL_LINKS)),
        scale=KIB,
        is_rate=True,
    ),
    NvmlQuery(
        SLOW,
        {"gpu/nvlink_rx": BYTES_PER_SECOND},
        (field_call(139, ALL_LINKS), field_call(204, ALL_LINKS)),
        scale=KIB,
        is_rate=True,
    ),
    NvmlQuery(RARE, {"gpu/ecc_corrected": COUNT}, _ecc_errors("CORRECTED")),
    NvmlQuery(RARE, {"gpu/ecc_uncorrected": COUNT}, _ecc_errors("UNCORRECTED")),
    NvmlQuery(
        RARE,
        {"gpu/remapped_rows": (0, 2**31), "gpu/remap_pending": FLAG, "gpu/remap_failed": FLAG},
        (_remapped_rows,),
    ),
    NvmlQuery(
        RARE, {"gpu/pcie_replays": (0, 2**32 - 2)}, (nvml_call("nvmlDeviceGetPcieReplayCounter"),)
    ),
)
KEYS = frozenset(key for query in QUERIES for key in query.metrics)

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
