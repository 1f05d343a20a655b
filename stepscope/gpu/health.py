"""Determine the health of a GPU from its samples, properties and events. Pure; no I/O.

Each function of RULES returns at most one issue; of the most severe ones the first is the status.
Thresholds are those of the driver, if available.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepscope.common.formatting import format_bytes, format_duration
from stepscope.gpu.device_info import DeviceProperties
from stepscope.gpu.machine_state import (
    DeviceHealth,
    DeviceState,
    HealthIssue,
    HealthStatus,
)

HOT_MARGIN = 5.0  # °C below the slowdown temperature; fans and load cause a few degrees.
LOADED = 50.0  # Utilization (%) above which a PCIe link should run at full speed.
FULL_LOAD = 90.0  # Utilization (%) above which a power cap is normal.
MEMORY_FULL = 0.95  # Used fraction of the memory above which the next allocation may fail.
IDLE = 1.0  # Utilization (%) below which a GPU is idle.
XID_NEW_S = 600.0  # Maximum age of an Xid event that counts as current.
XID_PAGE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"

POWER_CAP = 0x04
SLOWDOWN = 0x08
SW_THERMAL = 0x20
HW_THERMAL = 0x40
POWER_BRAKE = 0x80
"""Bits of nvmlClocksEventReasons (nvml.h)."""


OK, NOTICE, WARNING, CRITICAL = HealthStatus


def health(state: DeviceState) -> DeviceHealth:
    """Apply all rules to one GPU."""
    if state.lost is not None:
        text = f"{state.lost[:1].upper()}{state.lost[1:].rstrip('.')}. Retrying."
        return DeviceHealth(CRITICAL, text, (HealthIssue(CRITICAL, text),))
    found = [issue for rule in RULES for issue in rule(state)]
    issues = tuple(sorted(found, key=lambda issue: -issue.level.rank))
    if issues and issues[0].level is not OK:
        return DeviceHealth(issues[0].level, issues[0].text, issues)
    return DeviceHealth(OK, _ok_text(state, issues), issues)


def _ok_text(state: DeviceState, issues: Sequence[HealthIssue]) -> str:
    """Return the status line of a GPU without problems."""
    load = state.values.get("gpu/util")
    activity = "No problems found."
    if load is not None:
        activity = "Idle." if load < IDLE else "Working."
    return " ".join([activity, *(issue.text for issue in issues)])


def _errors(state: DeviceState) -> Iterator[HealthIssue]:
    if state.recovery is not None:
        yield HealthIssue(CRITICAL, f"Driver: {state.recovery}.")
    count = state.values.get("gpu/ecc_uncorrected", 0)
    new = count - state.first.get("gpu/ecc_uncorrected", count)
    if new > 0:
        text = "while being watched: results may be wrong. Restart the program."
        yield HealthIssue(CRITICAL, f"{_number(new, 'uncorrected memory error')} {text}")
    elif count > 0:
        text = "since the driver was loaded, none while being watched."
        yield HealthIssue(WARNING, f"{_number(count, 'uncorrected memory error')} {text}")
    if state.xids:
        recent = [xid for xid in state.xids if xid.age_s < XID_NEW_S]
        shown = min(recent or state.xids, key=lambda xid: (-xid.level.rank, xid.age_s))
        total = f" ({len(state.xids)} in all)" if len(state.xids) > 1 else ""
        text = f"{shown.text}, {format_duration(shown.age_s)} ago{total}. See {XID_PAGE}"
        yield HealthIssue(shown.level if recent else NOTICE, text)


def _heat(state: DeviceState) -> Iterator[HealthIssue]:
    mask = int(state.values.get("gpu/throttle_reasons", 0))
    temperature = state.values.get("gpu/temp")
    margin = state.values.get("gpu/temp_margin")
    slowdown = None if state.facts is None else state.facts.temp_slowdown
    degrees = "" if temperature is None else f": {temperature:.0f} °C"
    limit = "" if slowdown is None else f", slowdown at {slowdown:.0f} °C"
    if margin is None and temperature is not None and slowdown is not None:
        margin = slowdown - temperature
    if mask & HW_THERMAL:
        yield HealthIssue(WARNING, f"Thermal throttling now, by the hardware{degrees}{limit}.")
    elif mask & SW_THERMAL:
        yield HealthIssue(WARNING, f"Thermal throttling now, by the driver{degrees}{limit}.")
    elif mask & SLOWDOWN and not mask & POWER_BRAKE:
        yield HealthIssue(WARNING, f"Hardware slowdown now, for heat or power{degrees}{limit}.")
    elif margin is not None and margin <= HOT_MARGIN:
        near = f"{margin:.0f} °C below its slowdown" if margin > 0 else "at its slowdown"
        yield HealthIssue(NOTICE, f"Hot{degrees}, {near}.")
    if mask & POWER_BRAKE:
        text = "Power brake active: the machine's power supply or cooling requests it."
        yield HealthIssue(WARNING, text)


def _link(state: DeviceState) -> Iterator[HealthIssue]:
    facts = state.facts
    if facts is not None and state.is_link_slow:
        now = link(facts.pcie_gen, facts.pcie_width)
        most = link(facts.pcie_max_gen, facts.pcie_max_width)
        text = f"PCIe link at {now} under load, but capable of {most}: copies take longer."
        yield HealthIssue(WARNING, text)


def is_link_slow(facts: DeviceProperties, values: Mapping[str, float]) -> bool:
    """Return True for a link below its maximum under load; both are of the same time."""
    pairs = ((facts.pcie_gen, facts.pcie_max_gen), (facts.pcie_width, facts.pcie_max_width))
    below = any(now is not None and most is not None and now < most for now, most in pairs)
    return values.get("gpu/util", 0) >= LOADED and below


def link(generation: int | None, width: int | None) -> str:
    """Format a PCIe link, with "?" for an unknown value.

    >>> link(4, 16)
    'gen 4 ×16'
    """
    return f"gen {generation or '?'} ×{width or '?'}"


def _processes(state: DeviceState) -> Iterator[HealthIssue]:
    dead = [process for process in state.processes or () if process.state == "zombie"]
    if dead:
        pids = ", ".join(f"{process.pid} ({process.name})" for process in dead[:3])
        text = f"{_number(len(dead), 'dead process', 'es')} still on the GPU: {pids}."
        yield HealthIssue(WARNING, f"{text} Kill the parent.")


def _memory(state: DeviceState) -> Iterator[HealthIssue]:
    values = state.values
    total = values.get("gpu/mem_total", 0)
    usable = total - values.get("gpu/mem_reserved", 0)
    used = values.get("gpu/mem_used", 0)
    if total and used >= MEMORY_FULL * usable:
        free = format_bytes(max(0.0, usable - used))
        yield HealthIssue(NOTICE, f"Memory nearly full: {free} of {format_bytes(total)} free.")
    if values.get("gpu/remap_failed", 0) > 0:
        text = "A bad memory row could not be remapped: contact the GPU vendor."
        yield HealthIssue(CRITICAL, text)
    elif values.get("gpu/remap_pending", 0) > 0:
        text = "Bad memory rows are pending remap; takes effect after a GPU reset."
        yield HealthIssue(WARNING, text)


def _power(state: DeviceState) -> Iterator[HealthIssue]:
    if not int(state.values.get("gpu/throttle_reasons", 0)) & POWER_CAP:
        return
    limit = state.values.get("gpu/power_limit")
    default = None if state.facts is None else state.facts.power_limit_default
    at = "" if limit is None else f" of {limit:.0f} W"
    if limit is not None and default is not None and limit < default - 1:
        text = f"Capped by a power limit{at} below its default {default:.0f} W."
        yield HealthIssue(NOTICE, text)
    elif state.values.get("gpu/util", 100.0) < FULL_LOAD:
        yield HealthIssue(OK, f"Clocks are capped by the power limit{at}.")
    else:
        yield HealthIssue(OK, f"At its power limit{at}: normal at full load.")


def _number(count: float, what: str, plural: str = "s") -> str:
    return f"{count:.0f} {what}{'' if count == 1 else plural}"


RULES = (_errors, _heat, _link, _processes, _memory, _power)
