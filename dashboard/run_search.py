"""Search of the Runs page: words, and conditions such as `lr>0.01 val/loss<0.3 status=failed`."""

from __future__ import annotations

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
            known: dict[str, int] = {}
            found = [row for row in found if _holds(row, name, compare, value, known)]
    return found


def hint(rows: Iterable[RunRow], query: str) -> str | None:
    """Return which condition of a query no row can satisfy, or None."""
    known: dict[str, int] = {}
    listed = list(rows)
    for word in query.casefold().split():
        match = _CONDITION.fullmatch(word)
        if match is None and re.search("[<>=]", word):
            return f"{word}: a condition is a column, one of <, <=, >, >= and =, and a value."
        if match is not None and not any(_cells(row, match[1], known) for row in listed):
            return f"No column of these runs is named {match[1]}."
    return None


def _holds(row: RunRow, name: str, compare: str, value: str, known: dict[str, int]) -> bool:
    return any(_compares(cell, compare, value) for cell in _cells(row, name, known))


def _cells(row: RunRow, name: str, known: dict[str, int]) -> list[Cell]:
    """Return the cells of the columns of a name, the fixed column before others.

    A column is named without its prefix, and with _ for spaces: lr, best_loss. `known` caches the
    rank of each column.
    """
    if name == "duration":
        return [row.duration]
    if name == "started":
        return [datetime.fromtimestamp(row.created).isoformat(" ", "minutes")]
    asked, found = name.replace(":_", ":"), dict[int, list[Cell]]()
    for column, cell in row.cells.items():
        if column not in known:
            folded = column.casefold().replace(": ", ":").replace(" ", "_")
            short = re.sub("^(config|final):", "", folded)
            known[column] = 1 if folded == asked else 2 if short == asked else 0
        if known[column]:
            found.setdefault(known[column], []).append(cell)
    return found[min(found)] if found else []


def _compares(cell: Cell, compare: str, value: str) -> bool:
    if isinstance(cell, str) and _DATE.match(cell) and _DATE.match(value):
        return _COMPARE[compare](cell[: len(value)], value)
    try:
        if cell is None or _COMPARE[compare](float(cell), float(value)):
            return cell is not None
        return compare == "=" and value == str(cell).casefold()  # nan
    except (TypeError, ValueError):  # a text, of which a part is enough
        return compare == "=" and value in str(cell).casefold()
