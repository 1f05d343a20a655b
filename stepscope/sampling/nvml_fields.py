"""The NVML calls that Stepscope makes: which metric each gives, how often, and what is plausible.

`nvml.py` makes these calls under one error policy. Each reader takes a device handle and returns
the values of its field's keys in stored units, or raises what pynvml raises. Names of pynvml are
looked up when they are used, so that a wrong or old package does not break the import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pynvml


class Tier(StrEnum):
    """How often a value is read: about 10 Hz, 2 Hz and 1 Hz."""

    FAST = "fast"
    MEDIUM = "medium"
    SLOW = "slow"


def _utilization(handle: Any) -> tuple[float, ...]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory_used(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used,)


def _memory_used_v1(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetMemoryInfo(handle).used,)  # v1 counts the driver's reserve as used


def memory_total(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetMemoryInfo(handle).total,)


def _power_instant(handle: Any) -> tuple[float, ...]:
    whole_gpu = 0  # the scope of the field
    fields = [(pynvml.NVML_FI_DEV_POWER_INSTANT, whole_gpu)]
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, fields)
    if value.nvmlReturn != pynvml.NVML_SUCCESS:  # the call succeeds while a single field fails
        raise pynvml.NVMLError(value.nvmlReturn)
    members = {
        pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }
    return (getattr(value.value, members[value.valueType]) / 1e3,)  # mW


def _power_average(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,)  # mW


def _sm_clock(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),)


def _memory_clock(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),)


def _event_reasons(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),)


def _throttle_reasons(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),)


def _temperature_v(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU),)


def _temperature(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),)


def _energy(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,)  # mJ


def power_limit(handle: Any) -> tuple[float, ...]:
    return (pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,)  # mW


@dataclass(frozen=True, slots=True)
class Field:
    """One driver call: the metrics it gives, and `readers` tried in turn until one is supported."""

    tier: Tier
    keys: tuple[str, ...]
    readers: tuple[Callable[[Any], tuple[float, ...]], ...]


FIELDS: tuple[Field, ...] = (
    Field(Tier.FAST, ("gpu/util", "gpu/mem_util"), (_utilization,)),
    Field(Tier.FAST, ("gpu/mem_used",), (_memory_used, _memory_used_v1)),
    Field(Tier.FAST, ("gpu/power",), (_power_instant, _power_average)),
    Field(Tier.FAST, ("gpu/sm_clock",), (_sm_clock,)),
    Field(Tier.FAST, ("gpu/throttle_reasons",), (_event_reasons, _throttle_reasons)),
    Field(Tier.MEDIUM, ("gpu/temp",), (_temperature_v, _temperature)),
    Field(Tier.MEDIUM, ("gpu/mem_clock",), (_memory_clock,)),
    Field(Tier.MEDIUM, ("gpu/energy",), (_energy,)),
    Field(Tier.SLOW, ("gpu/power_limit",), (power_limit,)),
    Field(Tier.SLOW, ("gpu/mem_total",), (memory_total,)),
)

# A value outside its range is a sentinel or garbage; 0 is inside where it can be real.
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "gpu/util": (0, 100),
    "gpu/mem_util": (0, 100),
    "gpu/mem_used": (0, 2**50),
    "gpu/mem_total": (1, 2**50),
    "gpu/power": (0, 10_000),
    "gpu/power_limit": (1, 10_000),
    "gpu/energy": (0, 1e13),  # 10 kW for 30 years
    "gpu/sm_clock": (0, 100_000),
    "gpu/mem_clock": (0, 100_000),
    "gpu/temp": (-50, 200),
    "gpu/throttle_reasons": (0, 2**32 - 2),
}
