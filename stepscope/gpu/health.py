"""Determine the health of a GPU from its values, properties and events. Pure; no I/O.

Each function of RULES yields issues; of the most severe ones the first is the status. Thresholds
are those of the driver, if available.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.common.formatting import format_bytes, format_duration
from stepscope.gpu.device_events import POWER_CAP, throttle_words
from stepscope.gpu.machine_state import (
    DeviceHealth,
    DeviceState,
    HealthIssue,
    HealthStatus,
)

HOT_MARGIN = 5.0  # °C below the slowdown temperature; fans and load cause a few degrees.
MEMORY_FULL = 0.95  # Used fraction of the memory above which the next allocation may fail.
IDLE = 1.0  # Utilization (%) below which a GPU is idle.
XID_NEW_S = 600.0  # Maximum age of an Xid event that is an issue.
XID_PAGE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"

OK, NOTICE, WARNING, CRITICAL = HealthStatus


def health(state: DeviceState) -> DeviceHealth:
    """Apply all rules to one GPU."""
    if state.lost is not None:
        text = f"{state.lost[:1].upper()}{state.lost[1:].rstrip('.')}. Retrying."
        return DeviceHealth(CRITICAL, text, (HealthIssue(CRITICAL, text),))
    found = [issue for rule in RULES for issue in rule(state)]
    issues = tuple(sorted(found, key=lambda issue: -issue.level.rank))
    if issues:
        return DeviceHealth(issues[0].level, issues[0].text, issues)
    load = state.values.get("gpu/util")
    if load is None:
        return DeviceHealth(OK, "No problems found.")
    return DeviceHealth(OK, "Idle." if load < IDLE else "Working.")


def _errors(state: DeviceState) -> Iterator[HealthIssue]:
    if state.recovery is not None:
        yield HealthIssue(CRITICAL, f"Driver: {state.recovery}.")
    count = state.values.get("gpu/ecc_uncorrected", 0)
    if count > 0:
        text = _number(count, "uncorrected memory error")
        text += " since the driver was loaded: results of that time may be wrong."
        yield HealthIssue(WARNING, text)
    recent = [xid for xid in state.xids if xid.age_s < XID_NEW_S]
    if recent:
        shown = min(recent, key=lambda xid: (-xid.level.rank, xid.age_s))
        total = f" ({len(recent)} in all)" if len(recent) > 1 else ""
        text = f"{shown.text}, {format_duration(shown.age_s)} ago{total}. See {XID_PAGE}"
        yield HealthIssue(shown.level, text)


def _heat(state: DeviceState) -> Iterator[HealthIssue]:
    temperature = state.values.get("gpu/temp")
    slowdown = None if state.facts is None else state.facts.temp_slowdown
    margin = state.values.get("gpu/temp_margin")
    if margin is None and temperature is not None and slowdown is not None:
        margin = slowdown - temperature
    degrees = "" if temperature is None else f": {temperature:.0f} °C"
    words = throttle_words(int(state.values.get("gpu/throttle_reasons", 0)))
    if words:
        limit = "" if slowdown is None else f", slowdown at {slowdown:.0f} °C"
        text = f"Clocks lowered now by {' and '.join(words)}{degrees}{limit}."
        yield HealthIssue(WARNING, text)
    elif margin is not None and margin <= HOT_MARGIN:
        text = f"Hot{degrees}, {max(0.0, margin):.0f} °C below its slowdown."
        yield HealthIssue(NOTICE, text)


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
    """Yield a cap below the GPU's default; a cap at its default is normal at full load."""
    limit = state.values.get("gpu/power_limit")
    default = None if state.facts is None else state.facts.power_limit_default
    is_capped = int(state.values.get("gpu/throttle_reasons", 0)) & POWER_CAP
    if is_capped and limit is not None and default is not None and limit < default - 1:
        text = f"Capped by a power limit of {limit:.0f} W below its default {default:.0f} W."
        yield HealthIssue(NOTICE, text)


def _number(count: float, what: str, plural: str = "s") -> str:
    return f"{count:.0f} {what}{'' if count == 1 else plural}"


RULES = (_errors, _heat, _processes, _memory, _power)
