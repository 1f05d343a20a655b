"""NVML queries with their metrics and sampling tiers.

A reader is a function of a device handle that returns the values of the query's keys in stored
units, or a `FieldValueReader`; all field values that are due are read in one call. Names of pynvml
are resolved at the call, so that a wrong or old package does not break the import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pynvml

MILLI, NANO = 1e-3, 1e-9
KIB = 1024
ALL_LINKS = 2**32 - 1  # Scope of an NVLink field for the sum over all links.


class SamplingTier(StrEnum):
    """Sampling rate: about 10 Hz, 2 Hz, 1 Hz and 0.1 Hz."""

    FAST = "fast"
    MEDIUM = "medium"
    SLOW = "slow"
    RARE = "rare"


QueryValues = tuple[float | None, ...]
NvmlGetter = Callable[[Any], QueryValues]


@dataclass(frozen=True, slots=True)
class FieldValueReader:
    """A value of nvmlDeviceGetFieldValues, times `scale`.

    `ids` are pairs (first driver major, field id), newest first. R580 has renumbered some fields,
    so an older driver would return another quantity for the new number.
    """

    ids: tuple[tuple[int, int], ...]
    scale: float = 1.0
    scope: int = 0

    def id_for(self, driver: int | None) -> int | None:
        """Return the field id in this driver; None if the driver has none or is unknown."""
        return next((number for first, number in self.ids if (driver or 0) >= first), None)


QueryReader = NvmlGetter | FieldValueReader


@dataclass(frozen=True, slots=True)
class NvmlQuery:
    """One query: metric keys, and `readers` in the order of preference.

    `rate`: the metric is the rate of a byte counter, which for `wraps` may have 32 bits. `rest_s`:
    minimum period, for calls that take a millisecond or more (docs/gpu/h100.md).
    """

    tier: SamplingTier
    keys: tuple[str, ...]
    readers: tuple[QueryReader, ...]
    rate: bool = False
    wraps: bool = False
    rest_s: float = 0.0


def _utilization(handle: Any) -> QueryValues:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory_used(handle: Any) -> QueryValues:
    return (pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used,)


def _memory_used_v1(handle: Any) -> QueryValues:
    return (pynvml.nvmlDeviceGetMemoryInfo(handle).used,)  # v1 counts the driver's reserve as used


def _memory_total(handle: Any) -> QueryValues:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.total, memory.reserved


def _memory_total_v1(handle: Any) -> QueryValues:
    return memory_total(handle), None


def memory_total(handle: Any) -> int:
    """Return the installed bytes; every driver has this call."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def _get(name: str, *args: str, scale: float = 1) -> NvmlGetter:
    """Return a reader that calls pynvml.nvmlDeviceGetNAME with constants of pynvml."""
    function = f"nvmlDeviceGet{name}"

    def read(handle: Any) -> QueryValues:
        value = getattr(pynvml, function)(handle, *(getattr(pynvml, arg) for arg in args))
        return (value * scale,)

    read.__name__ = function
    return read


def _remapped_rows(handle: Any) -> QueryValues:
    corrected, uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return corrected + uncorrected, pending, failed


_FAST, _MEDIUM, _SLOW, _RARE = SamplingTier
_ECC = "TotalEccErrors"
SELDOM_S, ENERGY_S = 5.0, 2.0  # Periods of slow calls; runs of some seconds need two energies.


def _one(number: int, scale: float = 1.0, scope: int = 0) -> FieldValueReader:
    """Return a field that has the same id in every driver."""
    return FieldValueReader(((0, number),), scale, scope)


def _time(since_580: int) -> FieldValueReader:
    """Return a field for the duration of a throttle reason, which R580 has renumbered."""
    return FieldValueReader(((580, since_580), (575, since_580 - 18)), NANO)


# NVML_FI_DEV_*: 186 POWER_INSTANT, 82 MEMORY_TEMP, 83 TOTAL_ENERGY_CONSUMPTION, 197 and 198
# PCIE_COUNT_TX_BYTES and RX, 138 and 139 NVLINK_THROUGHPUT_DATA_TX and RX, 202 and 204 of NVLink 5.
FIELDS: tuple[NvmlQuery, ...] = (
    NvmlQuery(_FAST, ("gpu/util", "gpu/mem_util"), (_utilization,)),
    NvmlQuery(_FAST, ("gpu/mem_used",), (_memory_used, _memory_used_v1)),
    NvmlQuery(_FAST, ("gpu/power",), (_one(186, MILLI), _get("PowerUsage", scale=MILLI))),
    NvmlQuery(_MEDIUM, ("gpu/sm_clock",), (_get("ClockInfo", "NVML_CLOCK_SM"),)),
    NvmlQuery(
        _MEDIUM,
        ("gpu/throttle_reasons",),
        (_get("CurrentClocksEventReasons"), _get("CurrentClocksThrottleReasons")),
    ),
    # Ten times a second, because a counter of 32 bits wraps in a fraction of a second. A counter
    # that has exceeded 32 bits is read once a second.
    NvmlQuery(_FAST, ("gpu/pcie_tx",), (_one(197),), rate=True, wraps=True),
    NvmlQuery(_FAST, ("gpu/pcie_rx",), (_one(198),), rate=True, wraps=True),
    NvmlQuery(
        _MEDIUM,
        ("gpu/temp",),
        (_get("TemperatureV", "NVML_TEMPERATURE_GPU"), _get("Temperature", "NVML_TEMPERATURE_GPU")),
    ),
    NvmlQuery(_MEDIUM, ("gpu/temp_mem",), (_one(82),)),
    NvmlQuery(_MEDIUM, ("gpu/temp_margin",), (_get("MarginTemperature"),), rest_s=SELDOM_S),
    NvmlQuery(_MEDIUM, ("gpu/mem_clock",), (_get("ClockInfo", "NVML_CLOCK_MEM"),)),
    NvmlQuery(
        _MEDIUM,
        ("gpu/energy",),
        (_one(83, MILLI), _get("TotalEnergyConsumption", scale=MILLI)),
        rest_s=ENERGY_S,
    ),
    NvmlQuery(_SLOW, ("gpu/throttle_power",), (_one(74, NANO),)),
    NvmlQuery(_SLOW, ("gpu/throttle_sw_thermal",), (_time(269),)),
    NvmlQuery(_SLOW, ("gpu/throttle_hw_thermal",), (_time(270),)),
    NvmlQuery(_SLOW, ("gpu/throttle_brake",), (_time(271),)),
    NvmlQuery(_SLOW, ("gpu/mem_total", "gpu/mem_reserved"), (_memory_total, _memory_total_v1)),
    NvmlQuery(_SLOW, ("gpu/power_limit",), (_get("EnforcedPowerLimit", scale=MILLI),)),
    NvmlQuery(_SLOW, ("gpu/fan",), (_get("FanSpeed"),)),
    NvmlQuery(
        _SLOW, ("gpu/nvlink_tx",), (_one(138, KIB, ALL_LINKS), _one(202, 1, ALL_LINKS)), rate=True
    ),
    NvmlQuery(
        _SLOW, ("gpu/nvlink_rx",), (_one(139, KIB, ALL_LINKS), _one(204, 1, ALL_LINKS)), rate=True
    ),
    NvmlQuery(
        _RARE,
        ("gpu/ecc_corrected",),
        (_get(_ECC, "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"),),
    ),
    NvmlQuery(
        _RARE,
        ("gpu/ecc_uncorrected",),
        (_get(_ECC, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),),
    ),
    NvmlQuery(
        _RARE, ("gpu/remapped_rows", "gpu/remap_pending", "gpu/remap_failed"), (_remapped_rows,)
    ),
    NvmlQuery(_RARE, ("gpu/pcie_replays",), (_get("PcieReplayCounter"),)),
)

FASTEST = 2e12  # B/s above any interconnect: NVLink 5 has 0.9e12 per direction.
_SECONDS = (0, 1e9)  # 30 years.
_RANGES: tuple[tuple[str, tuple[float, float]], ...] = (
    ("util mem_util", (0, 100)),
    ("mem_used mem_reserved", (0, 2**50)),
    ("mem_total", (1, 2**50)),
    ("power", (0, 10_000)),
    ("power_limit", (1, 10_000)),
    ("energy", (0, 1e13)),  # 10 kW for 30 years.
    ("sm_clock mem_clock", (0, 100_000)),
    ("temp", (-50, 200)),
    ("temp_mem", (1, 200)),  # GPUs without this sensor return 0.
    ("temp_margin", (-200, 200)),
    ("fan", (0, 1000)),
    ("throttle_reasons pcie_replays", (0, 2**32 - 2)),
    ("throttle_power throttle_sw_thermal throttle_hw_thermal throttle_brake", _SECONDS),
    ("pcie_tx pcie_rx nvlink_tx nvlink_rx", (0, FASTEST)),
    ("ecc_corrected ecc_uncorrected", (0, 2**53)),
    ("remapped_rows", (0, 2**31)),
    ("remap_pending remap_failed", (0, 1)),
)
PLAUSIBLE = {f"gpu/{name}": range_ for names, range_ in _RANGES for name in names.split()}
"""Key -> minimum and maximum; a value outside is a sentinel or invalid."""

COUNTERS = {"gpu/energy", *(key for key in PLAUSIBLE if PLAUSIBLE[key] is _SECONDS)}
"""Monotonic counters until the driver is reloaded; a value that decreases is dropped once."""


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""nvmlValueType_t: the types are numbered in the order of the union's members (nvml.h)."""


def number_in(answer: Any) -> float | None:
    """Return a field's value, None for an unknown type. Raises NVMLError for its return code."""
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:  # Fields can fail in a successful call.
        raise pynvml.NVMLError(answer.nvmlReturn)
    known = answer.valueType < len(_MEMBERS)
    return getattr(answer.value, _MEMBERS[answer.valueType]) if known else None


def field_number(handle: Any, number: int) -> float | None:
    """Return the value of one field. Raises NVMLError."""
    (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [(number, 0)])
    return number_in(answer)
