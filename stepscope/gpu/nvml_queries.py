"""The questions that Stepscope asks NVML about a GPU: which metric each gives, and how often.

`nvml_source.py` asks them under the error policy of `nvml_device.py`. A reader is a function that
takes a device handle, or a `FieldValue`: all of those that are due travel in one call. Readers
return the values of their field's keys in stored units. Names of pynvml are looked up when they
are used, so that a wrong or old package does not break the import.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pynvml

MILLI, NANO = 1e-3, 1e-9
KIB = 1024
ALL_LINKS = 2**32 - 1
"""The scope of an NVLink field that stands for the sum over all links."""


class Tier(StrEnum):
    """How often a value is read: about 10 Hz, 2 Hz, 1 Hz and 0.1 Hz."""

    FAST = "fast"
    MEDIUM = "medium"
    SLOW = "slow"
    RARE = "rare"


Values = tuple[float | None, ...]
Call = Callable[[Any], Values]


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value of nvmlDeviceGetFieldValues, times `scale`.

    `ids` are pairs (first driver major, field id), newest first: R580 has given some fields other
    numbers, and asking an older driver for them would return something else.
    """

    ids: tuple[tuple[int, int], ...]
    scale: float = 1.0
    scope: int = 0

    def id_for(self, driver: int | None) -> int | None:
        """Return the field's number in this driver; None where it has none or is not known."""
        return next((number for first, number in self.ids if (driver or 0) >= first), None)


Reader = Call | FieldValue


@dataclass(frozen=True, slots=True)
class Field:
    """One question: the metrics it gives, and `readers` tried in turn until one is supported.

    `rate`: the reader gives a byte counter, from which the metric is worked out once a second.
    `wraps`: that counter may have 32 bits.
    """

    tier: Tier
    keys: tuple[str, ...]
    readers: tuple[Reader, ...]
    rate: bool = False
    wraps: bool = False


# --- calls ----------------------------------------------------------------------------------------


def _utilization(handle: Any) -> Values:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory_used(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used,)


def _memory_used_v1(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetMemoryInfo(handle).used,)  # v1 counts the driver's reserve as used


def _memory_total(handle: Any) -> Values:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.total, memory.reserved


def _memory_total_v1(handle: Any) -> Values:
    return memory_total(handle), None


def memory_total(handle: Any) -> int:
    """Return the bytes installed; every driver has this call."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def _power_average(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetPowerUsage(handle) * MILLI,)


def _power_limit(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) * MILLI,)


def _energy(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI,)


def _sm_clock(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),)


def _memory_clock(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),)


def _event_reasons(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),)


def _throttle_reasons(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),)


def _temperature_v(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU),)


def _temperature(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),)


def _margin(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetMarginTemperature(handle),)


def _fan(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetFanSpeed(handle),)


def _ecc_corrected(handle: Any) -> Values:
    return (_ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),)


def _ecc_uncorrected(handle: Any) -> Values:
    return (_ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),)


def _ecc(handle: Any, kind: int) -> int:
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC))


def _remapped_rows(handle: Any) -> Values:
    corrected, uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return corrected + uncorrected, pending, failed


def _pcie_replays(handle: Any) -> Values:
    return (pynvml.nvmlDeviceGetPcieReplayCounter(handle),)


# --- the table ------------------------------------------------------------------------------------

_POWER_INSTANT = FieldValue(((0, 186),), MILLI)
_MEMORY_TEMP = FieldValue(((0, 82),))
_ENERGY = FieldValue(((0, 83),), MILLI)
_PCIE_TX, _PCIE_RX = FieldValue(((0, 197),)), FieldValue(((0, 198),))
_HELD_BY_POWER = FieldValue(((0, 74),), NANO)
_SW_THERMAL = FieldValue(((580, 269), (575, 251)), NANO)
_HW_THERMAL = FieldValue(((580, 270), (575, 252)), NANO)
_POWER_BRAKE = FieldValue(((580, 271), (575, 253)), NANO)
_NVLINK_TX = FieldValue(((0, 138),), KIB, ALL_LINKS)
_NVLINK_RX = FieldValue(((0, 139),), KIB, ALL_LINKS)
_NVLINK5_TX, _NVLINK5_RX = (
    FieldValue(((0, 202),), 1, ALL_LINKS),
    FieldValue(((0, 204),), 1, ALL_LINKS),
)

_FAST, _MEDIUM, _SLOW, _RARE = Tier.FAST, Tier.MEDIUM, Tier.SLOW, Tier.RARE

FIELDS: tuple[Field, ...] = (
    Field(_FAST, ("gpu/util", "gpu/mem_util"), (_utilization,)),
    Field(_FAST, ("gpu/mem_used",), (_memory_used, _memory_used_v1)),
    Field(_FAST, ("gpu/power",), (_POWER_INSTANT, _power_average)),
    Field(_MEDIUM, ("gpu/sm_clock",), (_sm_clock,)),
    Field(_MEDIUM, ("gpu/throttle_reasons",), (_event_reasons, _throttle_reasons)),
    # Ten times a second, because a counter of 32 bits wraps in a fraction of a second; one that has
    # shown more bits is read once a second.
    Field(_FAST, ("gpu/pcie_tx",), (_PCIE_TX,), rate=True, wraps=True),
    Field(_FAST, ("gpu/pcie_rx",), (_PCIE_RX,), rate=True, wraps=True),
    Field(_MEDIUM, ("gpu/temp",), (_temperature_v, _temperature)),
    Field(_MEDIUM, ("gpu/temp_mem",), (_MEMORY_TEMP,)),
    Field(_MEDIUM, ("gpu/temp_margin",), (_margin,)),
    Field(_MEDIUM, ("gpu/mem_clock",), (_memory_clock,)),
    Field(_MEDIUM, ("gpu/energy",), (_ENERGY, _energy)),
    Field(_SLOW, ("gpu/throttle_power",), (_HELD_BY_POWER,)),
    Field(_SLOW, ("gpu/throttle_sw_thermal",), (_SW_THERMAL,)),
    Field(_SLOW, ("gpu/throttle_hw_thermal",), (_HW_THERMAL,)),
    Field(_SLOW, ("gpu/throttle_brake",), (_POWER_BRAKE,)),
    Field(_SLOW, ("gpu/mem_total", "gpu/mem_reserved"), (_memory_total, _memory_total_v1)),
    Field(_SLOW, ("gpu/power_limit",), (_power_limit,)),
    Field(_SLOW, ("gpu/fan",), (_fan,)),
    Field(_SLOW, ("gpu/nvlink_tx",), (_NVLINK_TX, _NVLINK5_TX), rate=True),
    Field(_SLOW, ("gpu/nvlink_rx",), (_NVLINK_RX, _NVLINK5_RX), rate=True),
    Field(_RARE, ("gpu/ecc_corrected",), (_ecc_corrected,)),
    Field(_RARE, ("gpu/ecc_uncorrected",), (_ecc_uncorrected,)),
    Field(_RARE, ("gpu/remapped_rows", "gpu/remap_pending", "gpu/remap_failed"), (_remapped_rows,)),
    Field(_RARE, ("gpu/pcie_replays",), (_pcie_replays,)),
)

# A value outside its range is a sentinel or garbage; 0 is inside where it can be real.
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "gpu/util": (0, 100),
    "gpu/mem_util": (0, 100),
    "gpu/mem_used": (0, 2**50),
    "gpu/mem_total": (1, 2**50),
    "gpu/mem_reserved": (0, 2**50),
    "gpu/power": (0, 10_000),
    "gpu/power_limit": (1, 10_000),
    "gpu/energy": (0, 1e13),  # 10 kW for 30 years
    "gpu/sm_clock": (0, 100_000),
    "gpu/mem_clock": (0, 100_000),
    "gpu/temp": (-50, 200),
    "gpu/temp_mem": (1, 200),  # 0 from GPUs that have no sensor there
    "gpu/temp_margin": (-200, 200),
    "gpu/fan": (0, 1000),
    "gpu/throttle_reasons": (0, 2**32 - 2),
    "gpu/throttle_power": (0, 1e9),  # 30 years
    "gpu/throttle_sw_thermal": (0, 1e9),
    "gpu/throttle_hw_thermal": (0, 1e9),
    "gpu/throttle_brake": (0, 1e9),
    "gpu/pcie_tx": (0, 2e12),
    "gpu/pcie_rx": (0, 2e12),
    "gpu/nvlink_tx": (0, 2e12),
    "gpu/nvlink_rx": (0, 2e12),
    "gpu/ecc_corrected": (0, 2**53),
    "gpu/ecc_uncorrected": (0, 2**53),
    "gpu/remapped_rows": (0, 2**31),
    "gpu/remap_pending": (0, 1),
    "gpu/remap_failed": (0, 1),
    "gpu/pcie_replays": (0, 2**32 - 2),
}

COUNTERS = {
    "gpu/energy",
    "gpu/throttle_power",
    "gpu/throttle_sw_thermal",
    "gpu/throttle_hw_thermal",
    "gpu/throttle_brake",
}
"""Values that only rise until the driver is loaded again: one that falls is dropped once."""


class _Value(ctypes.Union):
    """nvmlValue_t (nvml.h)."""

    _fields_ = [
        ("dVal", ctypes.c_double),
        ("uiVal", ctypes.c_uint),
        ("ulVal", ctypes.c_ulong),
        ("ullVal", ctypes.c_ulonglong),
        ("sllVal", ctypes.c_longlong),
        ("siVal", ctypes.c_int),
        ("usVal", ctypes.c_ushort),
    ]


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t (nvml.h)."""

    _fields_ = [
        ("fieldId", ctypes.c_uint),
        ("scopeId", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latencyUsec", ctypes.c_longlong),
        ("valueType", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", _Value),
    ]


_MEMBERS = {index: entry[0] for index, entry in enumerate(_Value._fields_)}
"""nvmlValueType_t: the types are numbered in the order of the union's members."""


class FieldValues:
    """Some fields, each a number and a scope, to be read again and again."""

    def __init__(self, numbers: Sequence[tuple[int, int]]) -> None:
        self._buffer = (_FieldValue * len(numbers))()
        for entry, (number, scope) in zip(self._buffer, numbers, strict=True):
            entry.fieldId, entry.scopeId = number, scope
        self._count = ctypes.c_int(len(numbers))
        self._pointer = ctypes.byref(self._buffer)

    def read(self, handle: Any) -> ctypes.Array[_FieldValue]:
        """Ask the driver; return its answers, valid until the next call. Raises NVMLError.

        The call succeeds while single fields fail: `nvmlReturn` of each says so.
        """
        function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
        pynvml._nvmlCheckReturn(function(handle, self._count, self._pointer))
        return self._buffer


def number_in(answer: Any) -> float | None:
    """Return the member of the union that the answer's type names; None for an unknown type."""
    member = _MEMBERS.get(answer.valueType)
    return None if member is None else getattr(answer.value, member)
