"""Read the tables `[command]` and `[webhook]` of alerts.toml, and check their fields."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stepscope.alerts.rules import AlertState, Severity


class AlertConfigError(ValueError):
    """Something that the file must not hold; the message is one sentence."""


def table_of(where: str, given: Any) -> Mapping[str, Any]:
    """Return a table."""
    if not isinstance(given, dict):
        raise AlertConfigError(f"{where}: must be a table, got {kind_of(given)}. Write [{where}].")
    return given


def only(where: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse fields of other names."""
    for name in table:
        if name not in names:
            # Not its value: it may be an address.
            raise AlertConfigError(
                f"{where}: has no field {ascii(name)[:60]}. Its fields are {', '.join(names)}."
            )


def number(
    where: str,
    name: str,
    table: Mapping[str, Any],
    low: float = -math.inf,
    high: float = math.inf,
    default: float | None = None,
) -> float:
    """Return a finite number within these bounds; the default where there is none."""
    if default is not None and name not in table:
        return default
    value: Any = table.get(name)
    # TOML's whole numbers have no bound, and a comparison does not mind.
    is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not is_number or not low <= value <= high:
        bounds = f" from {low:g} to {high:g}" if math.isfinite(low) else ""
        raise AlertConfigError(
            f"{where}.{name}: must be a number{bounds}, got {got(value)}. "
            "Write it without quotes and units."
        )
    return float(value)


def flag(where: str, name: str, table: Mapping[str, Any]) -> bool:
    """Return a truth value."""
    if type(table[name]) is not bool:
        raise AlertConfigError(f"{where}.{name}: must be true or false, got {got(table[name])}.")
    return bool(table[name])


def level_of(where: str, table: Mapping[str, Any]) -> Severity:
    """Return the level."""
    try:
        return Severity(table["level"])
    except ValueError:
        raise AlertConfigError(
            f"{where}.level: must be one of {', '.join(Severity)}, got {got(table['level'])}. "
            "Choose one of them."
        ) from None


def text_of(where: str, name: str, table: Mapping[str, Any], limit: int) -> str:
    """Return one line of text."""
    value = table.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= limit or not value.isprintable():
        raise AlertConfigError(
            f"{where}.{name}: must be one line of 1 to {limit} characters, got {got(value)}. "
            "Put quotes around it."
        )
    return value


def kind_of(value: Any) -> str:
    """Return what a value is without its content, which may be an address."""
    kinds = {
        str: "text",
        list: "a list",
        dict: "a table",
        bool: "true or false",
        type(None): "none",
    }
    return kinds.get(type(value), "another value")


def got(value: Any) -> str:
    """Return a value as a message shows it."""
    return "nothing" if value is None else ascii(value)[:60]


WORDS_LIMIT, WORD_LIMIT, URL_LIMIT = 50, 4000, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFilter:
    """Which alerts go a way: those of `level` and worse; `cleared` ones too?"""

    level: Severity = Severity.INFO
    cleared: bool = True

    def alert(self, level: Severity, state: AlertState) -> bool:
        """Say whether an alert goes this way."""
        return level.rank >= self.level.rank and (self.cleared or state is AlertState.RAISED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChannel(ChannelFilter):
    """The user's command: its words, of which no shell makes anything."""

    argv: tuple[str, ...]
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WebhookChannel(ChannelFilter):
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


def command(given: Any) -> CommandChannel:
    """Check `[command]`."""
    where, table = "command", table_of("command", given)
    only(where, table, ("argv", "timeout_s", "level", "cleared"))
    words = table.get("argv")
    if not isinstance(words, list) or not 1 <= len(words) <= WORDS_LIMIT:
        raise AlertConfigError(
            f"command.argv: must be a list of 1 to {WORDS_LIMIT} words, got {kind_of(words)}. "
            'No shell reads it: write ["notify-send", "Stepscope"].'
        )
    for word in words:
        if not isinstance(word, str) or "\0" in word or len(word) > WORD_LIMIT:
            raise AlertConfigError(
                f"command.argv: each word must be text of at most {WORD_LIMIT} characters, got "
                f"{kind_of(word)}. Put quotes around it."
            )
    if not words[0] or ("/" in words[0] and not words[0].startswith(("/", "~/"))):
        raise AlertConfigError(
            "command.argv: the program must be a name on the PATH or an absolute path, got another "
            "text. Write the whole path, and each word of the command apart."
        )
    timeout_s = number(where, "timeout_s", table, 0.1, 60, 10.0)
    words = [os.path.expanduser(words[0]), *words[1:]]
    return CommandChannel(argv=tuple(words), timeout_s=timeout_s, **_wants(where, table))


def webhook(given: Any) -> WebhookChannel:
    """Check `[webhook]`; the address itself is in no message."""
    where, table = "webhook", table_of("webhook", given)
    only(where, table, ("url", "timeout_s", "level", "cleared"))
    url = table.get("url")
    if not isinstance(url, str) or not url or len(url) > URL_LIMIT:
        raise AlertConfigError(
            f"webhook.url: must be an address of at most {URL_LIMIT} characters, got "
            f"{len(url) if isinstance(url, str) else kind_of(url)}. "
            "Copy it from the service that shall be called."
        )
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("https", "http"):
        raise AlertConfigError(
            "webhook.url: must begin with https:// or http://, got another scheme, or no valid "
            "address. Copy the whole address."
        )
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        raise AlertConfigError(
            "webhook.url: must have a host, and be plain characters without spaces, got another "
            "address. Copy the whole address."
        )
    if parts.username is not None or parts.password is not None:
        raise AlertConfigError(
            "webhook.url: must have no user and password before the host, got some. "
            "Use an address with a token in its path."
        )
    timeout_s = number(where, "timeout_s", table, 0.1, 30, 5.0)
    return WebhookChannel(url=url, timeout_s=timeout_s, **_wants(where, table))


def _wants(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "level" in table:
        found["level"] = level_of(where, table)
    if "cleared" in table:
        found["cleared"] = flag(where, "cleared", table)
    return found
