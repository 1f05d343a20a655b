"""The alert rules, and alerts.toml, which has rules, a command and a webhook.

The command runs as the user. So the file must belong to this user or root, and only the owner may
write it. An invalid entry is skipped and reported.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar
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


class AlertRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule; those with an empty `metric` get their values from `evaluator.py`.

    The rule holds while the metric is above or below the threshold, or not finite. It is over once
    the metric is back at `clear`, by default the threshold. These fields are replaced in `text`:
    {value}, {threshold}, {metric}, {device}, {seconds} and {step}.
    """

    name: str
    metric: Annotated[str, Meta(min_length=1, max_length=500)] = ""
    above: Number | None = None
    below: Number | None = None
    not_finite: bool = False
    clear: Number | None = None
    for_s: Seconds = 0.0
    clear_s: Seconds = 10.0
    level: AlertLevel = AlertLevel.WARNING
    text: Annotated[str, Meta(min_length=1, max_length=300)] = ""
    enabled: bool = True

    @property
    def threshold(self) -> float | None:
        """The value of `above` or `below`."""
        return self.above if self.below is None else self.below


MEMORY_FULL, THROTTLING, LOSS, NO_STEP = "memory_full", "throttling", "loss_not_finite", "no_step"
GPU_IDLE, GPU_LOST, RUN_FAILED, RUN_FINISHED = "gpu_idle", "gpu_lost", "run_failed", "run_finished"

DEFAULTS: tuple[AlertRule, ...] = (
    AlertRule(
        name=MEMORY_FULL,
        above=95,
        clear=90,
        clear_s=30,
        text="{device} is about to run out of memory: {value} is in use, and allocations were "
        "retried after the cache was emptied",
    ),
    AlertRule(
        name=THROTTLING,
        for_s=5,
        clear_s=30,
        text="{device}: clocks lowered by {value} for {seconds}",
    ),
    AlertRule(
        name=LOSS,
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
        name=GPU_IDLE,
        below=5,
        for_s=60,
        text="{device} is idle: utilization below {threshold} for {seconds}, while the run trains "
        "on it",
    ),
    AlertRule(name=GPU_LOST, clear_s=30, level=AlertLevel.CRITICAL, text="{device}: {value}"),
    AlertRule(name=RUN_FAILED, level=AlertLevel.CRITICAL, text="The run failed: {value}"),
    AlertRule(
        name=RUN_FINISHED,
        level=AlertLevel.INFO,
        text="The run finished after step {step}",
        enabled=False,
    ),
)
"""The rules without a file; `evaluator.py` computes their values."""

ENDINGS = (RUN_FAILED, RUN_FINISHED)  # evaluated once, at the end of the run

VARIABLE = "STEPSCOPE_ALERTS"  # path of the file, or "off" to disable alerts
SIZE_LIMIT = 64 * 1024
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_ENDING_FIELDS = ("enabled", "level", "text")
_DEFAULT_FIELDS = (*_ENDING_FIELDS, "for_s", "clear_s")
_BOUNDS = ("above", "below", "not_finite")
_CUSTOM_FIELDS = ("metric", *_BOUNDS, "clear", *_DEFAULT_FIELDS)
T = TypeVar("T")


class InvalidEntry(ValueError):
    """Invalid entry of the file; the message is one sentence without secrets."""


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

    argv: Annotated[
        tuple[Annotated[str, Meta(max_length=4000)], ...], Meta(min_length=1, max_length=50)
    ]
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 10.0

    def __post_init__(self) -> None:
        program = self.argv[0]
        if any("\0" in word for word in self.argv):
            raise ValueError("argv must not contain null characters")
        if not program or ("/" in program and not program.startswith(("/", "~/"))):
            raise ValueError("argv must begin with a name on the PATH or an absolute path")


class WebhookChannel(Channel, frozen=True, kw_only=True):
    """User's webhook; `url` is a secret."""

    url: Annotated[str, Meta(max_length=2000)]
    timeout_s: Annotated[float, Meta(ge=0.1, le=30)] = 5.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ValueError("url is not a valid address") from None  # the cause contains it
        if parts.scheme not in ("https", "http"):
            raise ValueError("url must begin with https:// or http://")
        if not host or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise ValueError("url must have a host, and only printable ASCII without spaces")
        if parts.username is not None or parts.password is not None:
            raise ValueError("url must have no user and password; use a token in its path")

    @property
    def shown(self) -> str:
        """Scheme and host."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}/…"

    def __repr__(self) -> str:
        return f"WebhookChannel({self.shown})"


def parse_entry(where: str, raw: object, type_: type[T]) -> T:
    """Convert a table of the file. Raises InvalidEntry, which names the field."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise InvalidEntry(f"{where}{path.rstrip('`')}: {text}.") from None


def parse_rule(name: str, raw: Any) -> AlertRule:
    """Return the changed default rule, or the new rule, of `[rules.NAME]`. Raises InvalidEntry."""
    where, shown = f"rules.{name}", ascii(name)[:60]
    if not _NAME.fullmatch(name):
        form = "a name must be 1 to 40 lowercase letters, digits, '_' and '-'"
        raise InvalidEntry(f"rules: {form}, got {shown}.")
    rule = parse_entry(where, raw | {"name": name} if isinstance(raw, dict) else raw, AlertRule)
    default = next((rule for rule in DEFAULTS if rule.name == name), None)
    allowed: tuple[str, ...] = _CUSTOM_FIELDS
    if default is not None:
        own = [field for field in ("above", "below") if getattr(default, field) is not None]
        own += ["clear"] if own else []
        allowed = _ENDING_FIELDS if name in ENDINGS else (*own, *_DEFAULT_FIELDS)
    for field in raw.keys() - set(allowed):
        text = f"has no field {ascii(field)[:60]}. Its fields are {', '.join(allowed)}."
        raise InvalidEntry(f"{where}: {text}")
    bounds = [bound for bound in _BOUNDS if getattr(rule, bound) not in (None, False)]
    if default is not None:
        rule = msgspec.structs.replace(default, **{field: getattr(rule, field) for field in raw})
    elif not rule.metric or len(bounds) != 1:
        raise InvalidEntry(f"{where}: must have a metric and exactly one of {', '.join(_BOUNDS)}.")
    if not rule.text:
        rule = msgspec.structs.replace(rule, text="{device}: {metric} is {value}")
    if not rule.metric.isprintable() or not rule.text.isprintable():
        raise InvalidEntry(f"{where}: metric and text must be one line of printable characters.")
    return rule


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rules and channels; `path` is None if alerts are off, `found`: the file exists."""

    rules: tuple[AlertRule, ...] = DEFAULTS
    command: CommandChannel | None = None
    webhook: WebhookChannel | None = None
    path: Path | None = None
    found: bool = False
    problems: tuple[str, ...] = ()  # One sentence per invalid entry.


def load(environ: Mapping[str, str] = os.environ) -> AlertSettings:
    """Read the file, if it exists; an error is one of the `problems`."""
    named = environ.get(VARIABLE)
    if named == "off":
        return AlertSettings()
    try:
        path = Path(named or "~/.config/stepscope/alerts.toml").expanduser()
    except RuntimeError:  # a user without a home folder
        return AlertSettings()
    try:
        return _parse(path, tomllib.loads(_read(path)))
    except FileNotFoundError:
        problems = (f"{path}: there is no such file. Correct {VARIABLE}.",) if named else ()
        return AlertSettings(path=path, problems=problems)
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})."
    except InvalidEntry as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"is not valid TOML ({str(error)[:120]})."
    problem = f"{path}: {problem} Only the default rules apply, and nothing is delivered."
    return AlertSettings(path=path, found=True, problems=(problem,))


def _read(path: Path) -> str:
    """Return the content. Raises OSError, UnicodeDecodeError, or InvalidEntry if it is unsafe."""
    with open(open_regular_file(path, follow_links=True), "rb") as file:
        state = os.fstat(file.fileno())
        if state.st_uid not in (os.geteuid(), 0):
            raise InvalidEntry(f"belongs to another user (number {state.st_uid}). Copy it.")
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(state.st_mode)
            text = f"can be written by others (mode {mode:03o}). Run: chmod go-w '{path}'."
            raise InvalidEntry(text)
        data = file.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise InvalidEntry(f"is larger than {SIZE_LIMIT // 1024} KiB.")
    return data.decode()


def _parse(path: Path, raw: dict[str, Any]) -> AlertSettings:
    problems = [
        f"{path}: {ascii(name)[:60]}: is no known table. Known are rules, command and webhook."
        for name in sorted(raw.keys() - {"rules", "command", "webhook"})
    ]
    rules = {rule.name: rule for rule in DEFAULTS}
    channels: dict[str, Any] = {}
    tables = raw.get("rules", {})
    if not isinstance(tables, dict):
        problems.append(f"{path}: rules: must be tables. Write [rules.NAME].")
        tables = {}
    for name, table in tables.items():
        try:
            rules[name] = parse_rule(name, table)
        except InvalidEntry as error:
            problems.append(f"{path}: {error}")
    for name, type_ in (("command", CommandChannel), ("webhook", WebhookChannel)):
        try:
            if name in raw:
                channels[name] = parse_entry(name, raw[name], type_)
        except InvalidEntry as error:
            problems.append(f"{path}: {error}")
    return AlertSettings(
        rules=tuple(rules.values()), path=path, found=True, problems=tuple(problems), **channels
    )
