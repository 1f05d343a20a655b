"""The alert rules, when they hold, and alerts.toml, which has rules, a command and a webhook.

The command runs as the user. So the file must belong to this user or root, and only the owner may
write it. If an entry is invalid, the file is ignored and the reason is reported.
"""

from __future__ import annotations

import math
import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from stepscope.common.files import open_regular_file

Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class AlertLevel(StrEnum):
    """Severity of an alert, the lowest first."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class AlertState(StrEnum):
    """Change that an alert reports."""

    RAISED = "raised"
    CLEARED = "cleared"


class AlertRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule, and its table in the file; `monitor.py` has the values of rules without `metric`.

    The rule holds while the metric is above or below the threshold, or not finite. These fields are
    replaced in `text`: {value}, {threshold}, {metric}, {device}, {seconds} and {step}.
    """

    name: str = ""  # The name of its table.
    metric: Annotated[str, Meta(min_length=1, max_length=500)] = ""
    above: Number | None = None
    below: Number | None = None
    not_finite: bool = False
    for_s: Seconds = 0.0
    clear_s: Seconds = 10.0
    level: AlertLevel = AlertLevel.WARNING
    text: Annotated[str, Meta(min_length=1, max_length=300)] = ""
    enabled: bool = True

    @property
    def threshold(self) -> float | None:
        """The value of `above` or `below`."""
        return self.above if self.below is None else self.below


def holds(rule: AlertRule, values: Sequence[float]) -> bool | None:
    """Return True if a rule holds for the values since the last evaluation, newest last.

    A rule without `for_s` holds if any value is bad; other rules hold only if all values are.
    Returns None without a value.
    """
    if rule.not_finite and values:
        is_bad = not all(map(math.isfinite, values))
        return is_bad and (rule.for_s == 0 or not math.isfinite(values[-1]))
    sign = 1 if rule.below is None else -1
    known = [sign * value for value in values if not math.isnan(value)]
    if not known:
        return None
    worst = max(known) if rule.for_s == 0 else min(known)
    return worst > sign * (rule.threshold or 0.0)


@dataclass(slots=True)
class AlertInstance:
    """State of a rule for one source: "" for the process, a GPU's UUID, the key of a loss."""

    for_s: float
    clear_s: float
    raised: bool = False
    raised_at: float = 0.0
    text: str = ""  # of the alert that was raised
    _since: float | None = None

    def update(self, now: float, is_bad: bool | None) -> AlertState | None:
        """Return the change at `now` (s); None and the present state restart the waiting time."""
        if is_bad is None or is_bad == self.raised:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < (self.clear_s if self.raised else self.for_s):
            return None
        self.raised = not self.raised
        self._since = None
        if self.raised:
            self.raised_at = now
        return AlertState.RAISED if self.raised else AlertState.CLEARED


NO_STEP, RUN_FAILED, RUN_FINISHED = "no_step", "run_failed", "run_finished"

DEFAULTS: tuple[AlertRule, ...] = (
    AlertRule(
        name="memory_full",
        above=95,
        clear_s=30,
        text="{device} is about to run out of memory: {value} is in use, and allocations were "
        "retried after the cache was emptied",
    ),
    AlertRule(
        name="throttling",
        for_s=5,
        clear_s=30,
        text="{device}: clocks lowered by {value} for {seconds}",
    ),
    AlertRule(
        name="loss_not_finite",
        not_finite=True,
        level=AlertLevel.CRITICAL,
        text="{metric} is {value} at step {step}",
    ),
    AlertRule(
        name=NO_STEP,
        for_s=60,
        clear_s=0,
        level=AlertLevel.CRITICAL,
        text="No step for {value}: the last was step {step}",
    ),
    AlertRule(
        name="gpu_idle",
        below=5,
        for_s=60,
        text="{device} is idle: utilization below {threshold} for {seconds}, while the run trains "
        "on it",
    ),
    AlertRule(name="gpu_lost", clear_s=30, level=AlertLevel.CRITICAL, text="{device}: {value}"),
    AlertRule(name=RUN_FAILED, level=AlertLevel.CRITICAL, text="The run failed: {value}"),
    AlertRule(
        name=RUN_FINISHED,
        level=AlertLevel.INFO,
        text="The run finished after step {step}",
        enabled=False,
    ),
)
"""The rules without a file; `monitor.py` computes their values."""

ENDINGS = (RUN_FAILED, RUN_FINISHED)  # evaluated once, at the end of the run

VARIABLE = "STEPSCOPE_ALERTS"  # path of the file, or "off" to disable alerts
SIZE_LIMIT = 64 * 1024
RuleName = Annotated[str, Meta(pattern="^[a-z][a-z0-9_-]{0,39}$")]
Argument = Annotated[str, Meta(max_length=4000)]


class Channel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alerts of `level` or worse are delivered; resolved alerts only if `cleared`."""

    level: AlertLevel = AlertLevel.INFO
    cleared: bool = True

    def accepts(self, level: AlertLevel, state: AlertState) -> bool:
        """Return True if the channel delivers such an alert."""
        levels = list(AlertLevel)
        is_severe = levels.index(level) >= levels.index(self.level)
        return is_severe and (self.cleared or state is AlertState.RAISED)


class CommandChannel(Channel, frozen=True, kw_only=True):
    """User's command, which runs without a shell."""

    argv: Annotated[tuple[Argument, ...], Meta(min_length=1, max_length=50)]

    def __post_init__(self) -> None:
        # The script chooses its working directory, and with it what "./x" would start.
        if not re.match(r"[^/]+$|/|~/", self.argv[0]):
            raise ValueError("argv must begin with a name on the PATH or an absolute path")


class WebhookChannel(Channel, frozen=True, kw_only=True):
    """User's webhook; `url` is a secret."""

    url: Annotated[str, Meta(max_length=2000)]

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_valid = parts.scheme in ("https", "http") and bool(parts.hostname)
        except ValueError:  # its text has the address
            is_valid = False
        if not is_valid:
            raise ValueError("url must begin with https:// or http:// and have a host")

    @property
    def shown(self) -> str:
        """Scheme and host."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}/…"

    def __repr__(self) -> str:
        return f"WebhookChannel({self.shown})"


class AlertFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of alerts.toml."""

    rules: dict[RuleName, dict[str, Any]] = {}
    command: CommandChannel | None = None
    webhook: WebhookChannel | None = None


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rules and channels; `path` is None if alerts are off.

    `problem` is a sentence if the file is invalid; then it has no effect.
    """

    rules: tuple[AlertRule, ...] = DEFAULTS
    command: CommandChannel | None = None
    webhook: WebhookChannel | None = None
    path: Path | None = None
    problem: str | None = None


def load(environ: Mapping[str, str] = os.environ) -> AlertSettings:
    """Read the file, if it exists; an error is the `problem`."""
    named = environ.get(VARIABLE)
    if named == "off":
        return AlertSettings()
    path = Path(os.path.expanduser(named or "~/.config/stepscope/alerts.toml"))
    try:
        file = msgspec.convert(tomllib.loads(_read(path)), AlertFile)
        rules = {rule.name: rule for rule in DEFAULTS}
        for name, table in file.rules.items():
            rules[name] = _rule_of(name, table)
    except FileNotFoundError:
        problem = f"{path}: there is no such file. Correct {VARIABLE}." if named else None
        return AlertSettings(path=path, problem=problem)
    except (OSError, ValueError, RecursionError) as error:
        problem = (
            f"{path}: {str(error)[:300]}. Only the default rules apply, and nothing is delivered."
        )
        return AlertSettings(path=path, problem=problem)
    return AlertSettings(
        rules=tuple(rules.values()), command=file.command, webhook=file.webhook, path=path
    )


def _read(path: Path) -> str:
    """Return the content. Raises OSError, or ValueError if it is unsafe."""
    with open(open_regular_file(path, follow_links=True), "rb") as file:
        state = os.fstat(file.fileno())
        if state.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"belongs to another user (number {state.st_uid}): copy it")
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"can be written by others: chmod go-w '{path}'")
        data = file.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise ValueError(f"is larger than {SIZE_LIMIT // 1024} KiB")
    return data.decode()


def _rule_of(name: str, table: dict[str, Any]) -> AlertRule:
    """Return a new rule, or the default rule with the fields of a table. Raises ValueError."""
    try:
        rule = msgspec.convert(table | {"name": name}, AlertRule)
    except msgspec.ValidationError as error:
        raise ValueError(f"rules.{name}: {error}") from None
    default = next((one for one in DEFAULTS if one.name == name), None)
    if default is None:
        if not rule.metric or [rule.above, rule.below, rule.not_finite or None].count(None) != 2:
            bounds = "exactly one of above, below, not_finite"
            raise ValueError(f"rules.{name}: must have a metric and {bounds}")
        return msgspec.structs.replace(rule, text=rule.text or "{device}: {metric} is {value}")
    for field in table:
        if field in ("metric", "not_finite") or getattr(default, field) is None:
            raise ValueError(f"rules.{name}: {field} cannot be changed")
    return msgspec.structs.replace(default, **{field: getattr(rule, field) for field in table})
