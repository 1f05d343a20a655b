"""Search of the Runs page: words, and conditions such as `lr>0.01 val/loss<0.3 status=failed`."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from dashboard.run_catalog import Cell, RunRow

_CONDITION = re.compile(r"([^<>=!]+)(<=|>=|<|>|=)([^<>=!]+)")
_DATE = re.compile(r"\d{4}-\d\d")  # dates of this form are in the order of their texts
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}


def matching(rows: Iterable[RunRow], query: str) -> list[RunRow]:
    """Return the rows with all words and conditions of a query, in any order and case."""
    found = list(rows)
    for word in query.casefold().split():
        match = _CONDITION.fullmatch(word)
        if match is None:
            found = [row for row in found if word.removeprefix("#") in row.words]
        else:
            name, compare, value = match.groups()
            found = [
                row
                for row in found
                if any(_compares(cell, compare, value) for cell in _cells(row, name))
            ]
    return found


def hint(rows: Iterable[RunRow], query: str) -> str | None:
    """Return which condition of a query no row can satisfy, or None."""
    listed = list(rows)
    for word in query.casefold().split():
        match = _CONDITION.fullmatch(word)
        if match is None and re.search("[<>=]", word):
            return f"{word}: a condition is a column, one of <, <=, >, >= and =, and a value."
        if match is not None and not any(_cells(row, match[1]) for row in listed):
            return f"No column of these runs is named {match[1]}."
    return None


def _cells(row: RunRow, name: str) -> list[Cell]:
    """Return the cells of the columns of a name, the fixed column before others.

    A column is named without its prefix, and with _ for spaces: lr, best_loss.
    """
    if name == "duration":
        return [row.duration]
    if name == "started":
        return [datetime.fromtimestamp(row.created).isoformat(" ", "minutes")]
    asked = name.replace(":_", ":")
    named = [(_names(column), cell) for column, cell in row.cells.items()]
    whole = [cell for (folded, _), cell in named if folded == asked]
    return whole or [cell for (_, short), cell in named if short == asked]


@functools.lru_cache(maxsize=10_000)
def _names(column: str) -> tuple[str, str]:
    """Return a column's name for a search, and the same without its prefix."""
    folded = column.casefold().replace(": ", ":").replace(" ", "_")
    return folded, re.sub("^(config|final):", "", folded)


def _compares(cell: Cell, compare: str, value: str) -> bool:
    if isinstance(cell, str) and _DATE.match(cell) and _DATE.match(value):
        return _COMPARE[compare](cell[: len(value)], value)
    try:
        if cell is None or _COMPARE[compare](float(cell), float(value)):
            return cell is not None
        return compare == "=" and value == str(cell).casefold()  # nan
    except (TypeError, ValueError):  # a text, of which a part is enough
        return compare == "=" and value in str(cell).casefold()
