"""Reads alerts.toml: what alerts, and who is told. Never from the page, and never from a run.

The file names a command that Stepscope runs, so it must belong to this user (or root) and nobody
else may write it. What is wrong in it is left out and said; the rest of it counts.
"""

from __future__ import annotations

import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stepscope.alerts import channels
from stepscope.alerts.channels import (
    AlertConfigError,
    CommandChannel,
    WebhookChannel,
    flag,
    got,
    level_of,
    number,
    only,
    table_of,
    text_of,
)
from stepscope.alerts.evaluator import FIELDS, FIELDS_OF_ENDINGS, is_of_devices
from stepscope.alerts.rules import (
    DEFAULTS,
    ENDINGS,
    GPU_IDLE,
    MEMORY_FULL,
    AlertRule,
    Comparison,
)
from stepscope.metrics import BY_KEY

NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
RULES_LIMIT = 50
TEXT_LIMIT, METRIC_LIMIT = 300, 500
LONGEST_S = 86_400.0
_COMMON = ("enabled", "level", "text", "for_s", "clear_s")
_OWN = ("metric", "above", "below", "not_finite", "clear", *_COMMON)
_BY_DEFAULT: dict[str, tuple[str, ...]] = {
    MEMORY_FULL: ("above", "clear", "enabled", "level", "text", "clear_s"),
    GPU_IDLE: ("below", "clear", *_COMMON),
    **dict.fromkeys(ENDINGS, ("enabled", "level", "text")),
}
_NAMES = {rule.name: rule for rule in DEFAULTS}


def parse_rule(name: str, given: Any) -> AlertRule:
    """Check `[rules.NAME]`: a change of a default, or a rule of the user's own."""
    where = f"rules.{name}"
    if not NAME.fullmatch(name):
        raise AlertConfigError(
            "rules: a name must be small letters, digits, '_' and '-', at most 40, got "
            f"{got(name)}. Rename the rule."
        )
    table = table_of(where, given)
    default = _NAMES.get(name)
    if default is None:
        return _own_rule(name, table, where)
    only(where, table, _BY_DEFAULT.get(name, _COMMON))
    if default.comparison.value in table:
        threshold = number(where, default.comparison.value, table)
        is_above = default.comparison is Comparison.ABOVE
        clear = min(threshold, default.clear) if is_above else threshold
        default = replace(default, threshold=threshold, clear=clear)
    if default.name == MEMORY_FULL and not 0 < default.threshold < 100:
        raise AlertConfigError(
            f"{where}.above: must be a share of the memory between 0 and 100 %, got "
            f"{default.threshold:g}. 95 is the default."
        )
    return _with_common(_with_clear(default, table, where), table, where)


def _own_rule(name: str, table: Mapping[str, Any], where: str) -> AlertRule:
    only(where, table, [name for name in _OWN if name != "clear" or "not_finite" not in table])
    metric = text_of(where, "metric", table, METRIC_LIMIT)
    kinds = [kind for kind in Comparison if kind.value in table]
    if len(kinds) != 1:
        raise AlertConfigError(
            f"{where}: must have exactly one of above, below and not_finite, got "
            f"{', '.join(kinds) or 'none'}. Known rules without them: {', '.join(_NAMES)}."
        )
    kind = kinds[0]
    threshold = math.nan
    if kind is Comparison.NOT_FINITE:
        if table["not_finite"] is not True:
            raise AlertConfigError(
                f"{where}.not_finite: must be true, got {got(table['not_finite'])}."
            )
    else:
        threshold = number(where, kind.value, table)
    found = AlertRule(
        name=name,
        metric=metric,
        comparison=kind,
        threshold=threshold,
        clear=threshold,
        text=_default_text(metric, kind),
    )
    found = _with_common(_with_clear(found, table, where), table, where)
    if "text" not in table and found.for_s > 0:
        found = replace(found, text=f"{found.text} for {{seconds}}")
    return found


def _default_text(metric: str, kind: Comparison) -> str:
    what = BY_KEY[metric].label if metric in BY_KEY else "{metric}"
    about = "{device}: " if is_of_devices(metric) else ""
    bound = "" if kind is Comparison.NOT_FINITE else f", {kind} {{threshold}}"
    return f"{about}{what} is {{value}}{bound}"


def _with_clear(found: AlertRule, table: Mapping[str, Any], where: str) -> AlertRule:
    if "clear" not in table:
        return found
    clear = number(where, "clear", table)
    sides = {Comparison.ABOVE: clear <= found.threshold, Comparison.BELOW: clear >= found.threshold}
    if not sides.get(found.comparison, False):
        side = "below" if found.comparison is Comparison.ABOVE else "above"
        raise AlertConfigError(
            f"{where}.clear: must be {side} the threshold {found.threshold:g} or equal, got "
            f"{clear:g}. The alert is over once the value is back at 'clear'."
        )
    return replace(found, clear=clear)


def _with_common(found: AlertRule, table: Mapping[str, Any], where: str) -> AlertRule:
    changes: dict[str, Any] = {}
    for name in ("for_s", "clear_s"):
        if name in table:
            changes[name] = number(where, name, table, 0, LONGEST_S)
    if "enabled" in table:
        changes["enabled"] = flag(where, "enabled", table)
    if "level" in table:
        changes["level"] = level_of(where, table)
    if "text" in table:
        changes["text"] = text = text_of(where, "text", table, TEXT_LIMIT)
        known = FIELDS_OF_ENDINGS if found.name in ENDINGS else FIELDS
        unknown = set(re.findall(r"\{(\w*)\}", text)) - known
        if unknown:
            raise AlertConfigError(
                f"{where}.text: may have in braces only {', '.join(sorted(known))}, got "
                f"{{{min(unknown)}}}. Write it without braces."
            )
    return replace(found, **changes)


VARIABLE = "STEPSCOPE_ALERTS"
"""Names the file, or is "off" for no alerts at all."""
OFF = "off"
SIZE_LIMIT = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """What alerts and who is told; `path` is None where alerts are off.

    `found`: there is such a file. `problems` say what is wrong with it, a sentence each.
    """

    rules: tuple[AlertRule, ...] = DEFAULTS
    command: CommandChannel | None = None
    webhook: WebhookChannel | None = None
    path: Path | None = None
    found: bool = False
    problems: tuple[str, ...] = field(default=())

    @property
    def on(self) -> bool:
        """Say whether anything is watched at all."""
        return self.path is not None


def path_of(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the file is expected; None where alerts are switched off."""
    named = environ.get(VARIABLE)
    if named == OFF:
        return None
    return Path(named or "~/.config/stepscope/alerts.toml").expanduser()


def load(environ: Mapping[str, str] = os.environ) -> AlertSettings:
    """Read the file, if there is one; raises nothing."""
    path = _or_none(lambda: path_of(environ))
    if path is None:
        return AlertSettings()
    try:
        given = tomllib.loads(_text_of(path))
    except FileNotFoundError:
        problems = (f"{path}: there is no such file. Correct {VARIABLE}, or make the file.",)
        return AlertSettings(path=path, problems=problems if environ.get(VARIABLE) else ())
    except OSError as error:
        return _refused(path, f"cannot be read ({error.strerror or error}). Make it readable.")
    except (AlertConfigError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        what = (
            error
            if isinstance(error, AlertConfigError)
            else f"is no valid TOML ({_line(error)}). Repair it."
        )
        return _refused(path, str(what))
    return _checked(path, given)


def _or_none(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except RuntimeError:  # a user without a home folder
        return None


def _refused(path: Path, why: str) -> AlertSettings:
    text = f"{path}: {why} Until then only the default rules count, and nobody is told."
    return AlertSettings(path=path, found=True, problems=(text,))


def _text_of(path: Path) -> str:
    """Return what the file holds. Raises OSError, UnicodeDecodeError, and Wrong for a file that
    others may write."""
    # A named pipe in its place must not hang the training.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            raise AlertConfigError("is no regular file. Put the rules into a file of their own.")
        if state.st_uid not in (os.geteuid(), 0):
            raise AlertConfigError(
                f"belongs to another user (number {state.st_uid}), who could have any command run "
                "as you. Copy it."
            )
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise AlertConfigError(
                f"can be written by others (mode {stat.S_IMODE(state.st_mode):03o}), who could "
                f"have any command run as you. Run: chmod go-w '{path}'."
            )
        data = opened.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise AlertConfigError(
            f"is larger than {SIZE_LIMIT // 1024} KiB. Keep the rules that you need."
        )
    return data.decode()


def _checked(path: Path, given: Mapping[str, Any]) -> AlertSettings:
    """Take over what is right, and note what is not."""
    problems: list[str] = []

    def tried(check: Callable[..., T], *args: Any) -> T | None:
        try:
            return check(*args)
        except AlertConfigError as error:
            problems.append(f"{path}: {error}")
            return None

    for name in sorted(given.keys() - {"rules", "command", "webhook"}):
        known = "Tables are rules, command and webhook."
        problems.append(f"{path}: {ascii(name)[:60]}: is no table here. {known}")
    rules = {rule.name: rule for rule in DEFAULTS}
    listed = given.get("rules", {})
    if not isinstance(listed, dict):
        problems.append(f"{path}: rules: must be tables, got another value. Write [rules.NAME].")
        listed = {}
    for name, table in list(listed.items())[:RULES_LIMIT]:
        rule = tried(parse_rule, name, table)
        if rule is not None:
            rules[name] = rule
    if len(listed) > RULES_LIMIT:
        problems.append(
            f"{path}: rules: must be at most {RULES_LIMIT}, got {len(listed)}. "
            "Those beyond are left out."
        )
    return AlertSettings(
        rules=tuple(rules.values()),
        command=tried(channels.command, given["command"]) if "command" in given else None,
        webhook=tried(channels.webhook, given["webhook"]) if "webhook" in given else None,
        path=path,
        found=True,
        problems=tuple(problems),
    )


def _line(error: Exception) -> str:
    """Return what is wrong, without what the file holds."""
    if isinstance(error, tomllib.TOMLDecodeError):
        return str(error)[:120]
    return type(error).__name__
