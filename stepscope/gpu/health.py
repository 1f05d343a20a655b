"""Determine the health of a GPU from its samples, properties and events. Pure; no I/O.

Each function of RULES returns at most one issue; of the most severe ones the first is the status.
Thresholds are those of the driver, if available.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stepscope.common.formatting import format_bytes, format_duration
from stepscope.gpu.device_info import DeviceProperties
from stepscope.gpu.processes import GpuProcess

HOT_MARGIN = 5.0  # °C below the slowdown temperature; fans and load cause a few degrees.
LOADED = 50.0  # Utilization (%) above which a PCIe link should run at full speed.
MIN_SLOW_POLLS = 2  # Consecutive polls, 10 s apart, with a slow link: it needs time to speed up.
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
REQUIRED_METRICS = ("gpu/temp", "gpu/throttle_reasons", "gpu/ecc_uncorrected")
"""Metrics without which problems of a GPU may be undetected."""


class HealthStatus(StrEnum):
    """Severity of an issue: CRITICAL endangers results, WARNING costs speed or memory."""

    OK = "ok"
    NOTICE = "notice"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Higher is more severe."""
        return list(HealthStatus).index(self)


OK, NOTICE, WARNING, CRITICAL = HealthStatus


@dataclass(frozen=True, slots=True)
class HealthIssue:
    """One problem or remark, with its severity."""

    level: HealthStatus
    text: str


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Status line and severity of a GPU, and all issues, the most severe first."""

    level: HealthStatus
    text: str
    issues: tuple[HealthIssue, ...] = ()


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One Xid event, the driver's error message, of a GPU at `ts` (epoch seconds).

    `gpu_instance` is the id of a MIG instance, None for a whole GPU.
    """

    uuid: str
    code: int
    text: str
    level: HealthStatus
    gpu_instance: int | None
    ts: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInputs:
    """Newest values, first values and events of a GPU; `missing` has reasons by metric key."""

    values: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    facts: DeviceProperties | None = None
    processes: tuple[GpuProcess, ...] = ()
    lost: str | None = None  # A text of the driver, as is `recovery`.
    recovery: str | None = None
    xids: tuple[XidEvent, ...] = ()
    slow_links: int = 0  # Latest consecutive polls with a slow link under load.

    @property
    def reasons(self) -> int:
        """The present bits of the clocks event reasons; 0 if unknown."""
        return int(self.values.get("gpu/throttle_reasons", 0))


def health(inputs: HealthInputs) -> DeviceHealth:
    """Apply all rules to one GPU."""
    if inputs.lost is not None:
        text = f"{inputs.lost[:1].upper()}{inputs.lost[1:].rstrip('.')}. Retrying."
        return DeviceHealth(CRITICAL, text, (HealthIssue(CRITICAL, text),))
    found = [issue for issue in (rule(inputs) for rule in RULES) if issue is not None]
    issues = tuple(sorted(found, key=lambda issue: -issue.level.rank))
    if issues and issues[0].level is not OK:
        return DeviceHealth(issues[0].level, issues[0].text, issues)
    return DeviceHealth(OK, _ok_text(inputs, issues), issues)


def _ok_text(inputs: HealthInputs, issues: tuple[HealthIssue, ...]) -> str:
    """Return the status line of a GPU without problems, with any sensors that are missing."""
    load = inputs.values.get("gpu/util")
    activity = "No problems found."
    if load is not None:
        activity = "Idle." if load < IDLE else "Working."
    text = " ".join([activity, *(issue.text for issue in issues)])
    if all(name in inputs.missing for name in REQUIRED_METRICS):
        return f"{text} Its sensors cannot be read here: {inputs.missing[REQUIRED_METRICS[0]]}."
    return text


def _recovery(inputs: HealthInputs) -> HealthIssue | None:
    if inputs.recovery is None:
        return None
    return HealthIssue(CRITICAL, f"Driver: {inputs.recovery}.")


def _uncorrected(inputs: HealthInputs) -> HealthIssue | None:
    count = inputs.values.get("gpu/ecc_uncorrected", 0)
    if count <= 0:
        return None
    new = count - inputs.first.get("gpu/ecc_uncorrected", count)
    level, text = WARNING, "since the driver was loaded, none while being watched."
    if new > 0:
        level, count = CRITICAL, new
        text = "while being watched: results may be wrong. Restart the program."
    return HealthIssue(level, f"{_number(count, 'uncorrected memory error')} {text}")


def _xid(inputs: HealthInputs) -> HealthIssue | None:
    if not inputs.xids:
        return None
    new = [xid for xid in inputs.xids if xid.age_s < XID_NEW_S]
    shown = min(new or inputs.xids, key=lambda xid: (-xid.level.rank, xid.age_s))
    more = f" ({len(inputs.xids)} in all)" if len(inputs.xids) > 1 else ""
    return HealthIssue(
        shown.level if new else NOTICE,
        f"{shown.text}, {format_duration(shown.age_s)} ago{more}. See {XID_PAGE}",
    )


def _heat(inputs: HealthInputs) -> HealthIssue | None:
    mask, temperature = inputs.reasons, inputs.values.get("gpu/temp")
    slowdown = inputs.facts.temp_slowdown if inputs.facts is not None else None
    degrees = "" if temperature is None else f": {temperature:.0f} °C"
    limit = "" if slowdown is None else f", slowdown at {slowdown:.0f} °C"
    if mask & (SW_THERMAL | HW_THERMAL):
        who = "hardware" if mask & HW_THERMAL else "driver"
        return HealthIssue(WARNING, f"Thermal throttling now, by the {who}{degrees}{limit}.")
    if mask & SLOWDOWN and not mask & POWER_BRAKE:
        return HealthIssue(WARNING, f"Hardware slowdown now, for heat or power{degrees}{limit}.")
    margin = inputs.values.get("gpu/temp_margin")
    if margin is None and temperature is not None and slowdown is not None:
        margin = slowdown - temperature
    if margin is not None and margin <= HOT_MARGIN:
        near = f"{margin:.0f} °C below its slowdown" if margin > 0 else "at its slowdown"
        return HealthIssue(NOTICE, f"Hot{degrees}, {near}.")
    return None


def _brake(inputs: HealthInputs) -> HealthIssue | None:
    if not inputs.reasons & POWER_BRAKE:
        return None
    text = "Power brake active: the machine's power supply or cooling requests it."
    return HealthIssue(WARNING, text)


def _link(inputs: HealthInputs) -> HealthIssue | None:
    facts = inputs.facts
    if (
        facts is None
        or inputs.slow_links < MIN_SLOW_POLLS
        or not is_link_slow(facts, inputs.values)
    ):
        return None
    now = link(facts.pcie_gen, facts.pcie_width)
    most = link(facts.pcie_max_gen, facts.pcie_max_width)
    text = f"PCIe link at {now} under load, but capable of {most}: copies take longer."
    return HealthIssue(WARNING, text)


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


def _zombies(inputs: HealthInputs) -> HealthIssue | None:
    dead = [process for process in inputs.processes if process.state == "zombie"]
    if not dead:
        return None
    subject = "A dead process still holds"
    if len(dead) > 1:
        subject = f"{len(dead)} ended processes hold"
    return HealthIssue(WARNING, f"{subject} {_held(dead)} Kill its parent.")


def _hidden(inputs: HealthInputs) -> HealthIssue | None:
    gone = [process for process in inputs.processes if process.state == "gone"]
    if not gone:
        return None
    where = "not visible from here (ended, or in another container)"
    text = f"A process {where} holds" if len(gone) == 1 else f"{len(gone)} processes {where} hold"
    return HealthIssue(NOTICE, f"{text} {_held(gone)}")


def _held(processes: list[GpuProcess]) -> str:
    """Format the total memory and the first names of some processes."""
    known = [process.memory for process in processes if process.memory is not None]
    what = f"{format_bytes(sum(known))} of memory" if known else "memory"
    names = ", ".join(f"{process.pid} ({process.name})" for process in processes[:3])
    more = f" and {len(processes) - 3} more" if len(processes) > 3 else ""
    return f"{what}: {names}{more}."


def _memory(inputs: HealthInputs) -> HealthIssue | None:
    used, total = (inputs.values.get(key) for key in ("gpu/mem_used", "gpu/mem_total"))
    if used is None or not total:
        return None
    usable = total - inputs.values.get("gpu/mem_reserved", 0)
    if used < MEMORY_FULL * usable:
        return None
    free = format_bytes(max(0.0, usable - used))
    return HealthIssue(NOTICE, f"Memory nearly full: {free} of {format_bytes(total)} free.")


def _remapped(inputs: HealthInputs) -> HealthIssue | None:
    if inputs.values.get("gpu/remap_failed", 0) > 0:
        text = "A bad memory row could not be remapped: contact the GPU vendor."
        return HealthIssue(CRITICAL, text)
    if inputs.values.get("gpu/remap_pending", 0) > 0:
        text = "Bad memory rows are pending remap; takes effect after a GPU reset."
        return HealthIssue(WARNING, text)
    rows = inputs.values.get("gpu/remapped_rows", 0)
    if rows <= 0:
        return None
    are = "is" if rows == 1 else "are"
    return HealthIssue(NOTICE, f"{_number(rows, 'row')} of memory {are} remapped to spare rows.")


def _capped(inputs: HealthInputs) -> HealthIssue | None:
    if not inputs.reasons & POWER_CAP:
        return None
    facts = inputs.facts
    limit = inputs.values.get("gpu/power_limit") or (facts.power_limit if facts else None)
    default = facts.power_limit_default if facts is not None else None
    at = "" if limit is None else f" of {limit:.0f} W"
    if limit is not None and default is not None and limit < default - 1:
        text = f"Capped by a power limit{at} below its default {default:.0f} W."
        return HealthIssue(NOTICE, text)
    if inputs.values.get("gpu/util", 100.0) < FULL_LOAD:
        return HealthIssue(OK, f"Clocks are capped by the power limit{at}.")
    return HealthIssue(OK, f"At its power limit{at}: normal at full load.")


def _number(count: float, what: str) -> str:
    return f"{count:.0f} {what}{'' if count == 1 else 's'}"


RULES: tuple[Callable[[HealthInputs], HealthIssue | None], ...] = (
    _recovery,
    _uncorrected,
    _xid,
    _heat,
    _brake,
    _link,
    _zombies,
    _hidden,
    _memory,
    _remapped,
    _capped,
)
