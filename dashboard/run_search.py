"""Search of the Runs page: words, and conditions such as `lr>0.01 val/loss<0.3 status=failed`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

from dashboard.run_catalog import Cell, RunRow

_CONDITION = re.compile(r"([^<>=]+)(<=|>=|<|>|=)([^<>=]+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
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
            found = [row for row in found if word in row.words]
        else:
            name, compare, value = match.groups()
            # A column is named without its prefix, and with _ for spaces: lr, best_loss.
            known: dict[str, bool] = {}
            found = [row for row in found if _holds(row, name, compare, value, known)]
    return found


def _holds(row: RunRow, name: str, compare: str, value: str, known: dict[str, bool]) -> bool:
    for column, cell in row.cells.items():
        if column not in known:
            folded = column.casefold().replace(" ", "_")
            known[column] = name in (folded, re.sub("^(config|final):_", "", folded))
        if known[column] and _compares(cell, compare, value):
            return True
    return False


def _compares(cell: Cell, compare: str, value: str) -> bool:
    try:
        if cell is None or _COMPARE[compare](float(cell), float(value)):
            return cell is not None
        return compare == "=" and value == str(cell).casefold()  # nan
    except (TypeError, ValueError):  # a text, of which a part is enough
        return compare == "=" and value in str(cell).casefold()
