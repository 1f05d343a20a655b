"""What alerts.toml may hold: each function returns the checked thing, or raises Wrong. Pure.

A message names the field, what it must be, what it was, and what to do; an address is never in it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from stepscope.alerts.judge import FIELDS, is_of_devices
from stepscope.alerts.rules import (
    DEFAULTS,
    ENDINGS,
    GPU_IDLE,
    MEMORY_FULL,
    Comparison,
    Level,
    Rule,
    State,
)
from stepscope.metrics import BY_KEY

NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
RULES_LIMIT = 50
TEXT_LIMIT, METRIC_LIMIT, URL_LIMIT = 300, 500, 2000
WORDS_LIMIT, WORD_LIMIT = 50, 4000
LONGEST_S = 86_400.0
_COMMON = ("enabled", "level", "text", "for_s", "clear_s")
_OWN = ("metric", "above", "below", "not_finite", "clear", *_COMMON)
_BY_DEFAULT: dict[str, tuple[str, ...]] = {
    MEMORY_FULL: ("above", "clear", "enabled", "level", "text", "clear_s"),
    GPU_IDLE: ("below", "clear", *_COMMON),
    **dict.fromkeys(ENDINGS, ("enabled", "level", "text")),
}
_NAMES = {rule.name: rule for rule in DEFAULTS}


class Wrong(ValueError):
    """Something that the file must not hold; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """Which alerts go a way: those of `level` and worse; `cleared` ones too?"""

    level: Level = Level.INFO
    cleared: bool = True

    def alert(self, level: Level, state: State) -> bool:
        """Say whether an alert goes this way."""
        return level.rank >= self.level.rank and (self.cleared or state is State.RAISED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Wants):
    """The user's command: its words, of which no shell makes anything."""

    argv: tuple[str, ...]
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Webhook(Wants):
    """The user's webhook; its address is a secret, `shown` is not."""

    url: str
    timeout_s: float = 5.0

    @property
    def shown(self) -> str:
        """Scheme and host, without what may be a token."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}/…"

    def __repr__(self) -> str:
        return f"Webhook({self.shown})"


def rule(name: str, given: Any) -> Rule:
    """Check `[rules.NAME]`: a change of a default, or a rule of the user's own."""
    where = f"rules.{name}"
    if not NAME.fullmatch(name):
        raise Wrong(
            "rules: a name must be small letters, digits, '_' and '-', at most 40, got "
            f"{_got(name)}. Rename the rule."
        )
    table = _table(where, given)
    default = _NAMES.get(name)
    if default is None:
        return _own_rule(name, table, where)
    _only(where, table, _BY_DEFAULT.get(name, _COMMON))
    if default.comparison.value in table:
        number = _number(where, default.comparison.value, table)
        default = replace(default, threshold=number, clear=min(number, default.clear))
        if default.comparison is Comparison.BELOW:
            default = replace(default, clear=number)
    if default.name == MEMORY_FULL and not 0 < default.threshold < 100:
        raise Wrong(
            f"{where}.above: must be a share of the memory between 0 and 100 %, got "
            f"{default.threshold:g}. 95 is the default."
        )
    return _with_common(_with_clear(default, table, where), table, where)


def _own_rule(name: str, table: Mapping[str, Any], where: str) -> Rule:
    _only(where, table, [name for name in _OWN if name != "clear" or "not_finite" not in table])
    metric = _text(where, "metric", table, METRIC_LIMIT, None)
    kinds = [kind for kind in Comparison if kind.value in table]
    if len(kinds) != 1:
        raise Wrong(
            f"{where}: must have exactly one of above, below and not_finite, got "
            f"{', '.join(kinds) or 'none'}. Known rules without them: {', '.join(_NAMES)}."
        )
    kind = kinds[0]
    threshold = math.nan
    if kind is Comparison.NOT_FINITE:
        if table["not_finite"] is not True:
            raise Wrong(f"{where}.not_finite: must be true, got {_got(table['not_finite'])}.")
    else:
        threshold = _number(where, kind.value, table)
    found = Rule(
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


def _with_clear(found: Rule, table: Mapping[str, Any], where: str) -> Rule:
    if "clear" not in table:
        return found
    clear = _number(where, "clear", table)
    sides = {Comparison.ABOVE: clear <= found.threshold, Comparison.BELOW: clear >= found.threshold}
    if not sides.get(found.comparison, False):
        side = "below" if found.comparison is Comparison.ABOVE else "above"
        raise Wrong(
            f"{where}.clear: must be {side} the threshold {found.threshold:g} or equal, got "
            f"{clear:g}. The alert is over once the value is back at 'clear'."
        )
    return replace(found, clear=clear)


def _with_common(found: Rule, table: Mapping[str, Any], where: str) -> Rule:
    changes: dict[str, Any] = {}
    for name in ("for_s", "clear_s"):
        if name in table:
            changes[name] = _number(where, name, table, 0, LONGEST_S)
    if "enabled" in table:
        changes["enabled"] = _flag(where, "enabled", table)
    if "level" in table:
        changes["level"] = _level(where, table)
    if "text" in table:
        changes["text"] = text = _text(where, "text", table, TEXT_LIMIT, None)
        unknown = set(re.findall(r"\{(\w*)\}", text)) - FIELDS
        if unknown:
            raise Wrong(
                f"{where}.text: may have in braces only {', '.join(sorted(FIELDS))}, got "
                f"{{{min(unknown)}}}. Write it without braces."
            )
    return replace(found, **changes)


def command(given: Any) -> Command:
    """Check `[command]`."""
    where, table = "command", _table("command", given)
    _only(where, table, ("argv", "timeout_s", "level", "cleared"))
    words = table.get("argv")
    if not isinstance(words, list) or not 1 <= len(words) <= WORDS_LIMIT:
        raise Wrong(
            f"command.argv: must be a list of 1 to {WORDS_LIMIT} words, got {_got(words)}. "
            'No shell reads it: write ["notify-send", "Stepscope"].'
        )
    for word in words:
        if not isinstance(word, str) or "\0" in word or len(word) > WORD_LIMIT:
            raise Wrong(
                f"command.argv: each word must be text of at most {WORD_LIMIT} characters, got "
                f"{_got(word)}. Put quotes around it."
            )
    if not words[0] or ("/" in words[0] and not words[0].startswith(("/", "~/"))):
        raise Wrong(
            f"command.argv: the program must be a name on the PATH or an absolute path, got "
            f"{_got(words[0])}. Write the whole path."
        )
    timeout_s = _number(where, "timeout_s", table, 0.1, 60, 10.0)
    return Command(argv=tuple(words), timeout_s=timeout_s, **_wants(where, table))


def webhook(given: Any) -> Webhook:
    """Check `[webhook]`; the address itself is in no message."""
    where, table = "webhook", _table("webhook", given)
    _only(where, table, ("url", "timeout_s", "level", "cleared"))
    url = table.get("url")
    if not isinstance(url, str) or not url or len(url) > URL_LIMIT:
        raise Wrong(
            f"webhook.url: must be an address of at most {URL_LIMIT} characters, got "
            f"{len(url) if isinstance(url, str) else _kind(url)}. "
            "Copy it from the service that shall be called."
        )
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("https", "http"):
        raise Wrong(
            f"webhook.url: must begin with https:// or http://, got the scheme "
            f"{_got(parts.scheme)}. Copy the whole address."
        )
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        raise Wrong(
            "webhook.url: must have a host, and be plain characters without spaces, got another "
            "address. Copy the whole address."
        )
    if parts.username is not None or parts.password is not None:
        raise Wrong(
            "webhook.url: must have no user and password before the host, got some. "
            "Use an address with a token in its path."
        )
    timeout_s = _number(where, "timeout_s", table, 0.1, 30, 5.0)
    return Webhook(url=url, timeout_s=timeout_s, **_wants(where, table))


def _wants(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "level" in table:
        found["level"] = _level(where, table)
    if "cleared" in table:
        found["cleared"] = _flag(where, "cleared", table)
    return found


def _table(where: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise Wrong(f"{where}: must be a table, got {_kind(given)}. Write [{where}].")
    return given


def _only(where: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in table:
        if name not in names:
            # Not its value: it may be an address.
            raise Wrong(
                f"{where}: has no field {ascii(name)[:60]}. Its fields are {', '.join(names)}."
            )


def _number(
    where: str,
    name: str,
    table: Mapping[str, Any],
    low: float = -math.inf,
    high: float = math.inf,
    default: float | None = None,
) -> float:
    if default is not None and name not in table:
        return default
    value: Any = table.get(name)
    # TOML's whole numbers have no bound, and a comparison does not mind.
    is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not is_number or not low <= value <= high:
        bounds = f" from {low:g} to {high:g}" if math.isfinite(low) else ""
        raise Wrong(
            f"{where}.{name}: must be a number{bounds}, got {_got(value)}. "
            "Write it without quotes and units."
        )
    return float(value)


def _flag(where: str, name: str, table: Mapping[str, Any]) -> bool:
    if type(table[name]) is not bool:
        raise Wrong(f"{where}.{name}: must be true or false, got {_got(table[name])}.")
    return bool(table[name])


def _level(where: str, table: Mapping[str, Any]) -> Level:
    try:
        return Level(table["level"])
    except ValueError:
        raise Wrong(
            f"{where}.level: must be one of {', '.join(Level)}, got {_got(table['level'])}. "
            "Choose one of them."
        ) from None


def _text(where: str, name: str, table: Mapping[str, Any], limit: int, default: str | None) -> str:
    value = table.get(name, default)
    if not isinstance(value, str) or not 0 < len(value) <= limit or not value.isprintable():
        raise Wrong(
            f"{where}.{name}: must be one line of 1 to {limit} characters, got {_got(value)}. "
            "Put quotes around it."
        )
    return value


def _kind(value: Any) -> str:
    """Return what a value is without its content, which may be an address."""
    kinds = {
        str: "text",
        list: "a list",
        dict: "a table",
        bool: "true or false",
        type(None): "none",
    }
    return kinds.get(type(value), "another value")


def _got(value: Any) -> str:
    return "nothing" if value is None else ascii(value)[:60]
