"""Checks of single values of alerts.toml: each returns the checked one, or raises Wrong. Pure.

A message names the field, what it must be, what it was, and what to do; an address is never in it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.alerts.rules import Level


class Wrong(ValueError):
    """Something that the file must not hold; the message is one sentence."""


def table_of(where: str, given: Any) -> Mapping[str, Any]:
    """Return a table."""
    if not isinstance(given, dict):
        raise Wrong(f"{where}: must be a table, got {kind_of(given)}. Write [{where}].")
    return given


def only(where: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse fields of other names."""
    for name in table:
        if name not in names:
            # Not its value: it may be an address.
            raise Wrong(
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
        raise Wrong(
            f"{where}.{name}: must be a number{bounds}, got {got(value)}. "
            "Write it without quotes and units."
        )
    return float(value)


def flag(where: str, name: str, table: Mapping[str, Any]) -> bool:
    """Return a truth value."""
    if type(table[name]) is not bool:
        raise Wrong(f"{where}.{name}: must be true or false, got {got(table[name])}.")
    return bool(table[name])


def level_of(where: str, table: Mapping[str, Any]) -> Level:
    """Return the level."""
    try:
        return Level(table["level"])
    except ValueError:
        raise Wrong(
            f"{where}.level: must be one of {', '.join(Level)}, got {got(table['level'])}. "
            "Choose one of them."
        ) from None


def text_of(where: str, name: str, table: Mapping[str, Any], limit: int) -> str:
    """Return one line of text."""
    value = table.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= limit or not value.isprintable():
        raise Wrong(
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
