"""Files of measured collectives: a JSON document each, in `collectives` of the runs' folder."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_write, read_json
from stepscope.run import folder_name, is_run_id

FOLDER = "collectives"
SCHEMA = 1
BYTES_LIMIT = 16 * 2**20
SPREAD = ("fastest_s", "slowest_s")
"""Keys of a row that a measurement may lack."""
_NAME = re.compile(r"(\d{8}-\d{6})(Z?)-([a-z]+)-(\d+)-(\d{3})")
LEAST, MOST = 1e-12, 1e18
"""Seconds, bytes and bytes/s beyond these are no measurement; those between fit a log axis."""


class ResultError(Exception):
    """A file that is not a measurement; the message is one sentence with a remedy."""


def new_result_path(root: Path, backend: str, ranks: int) -> Path:
    """Return a free path for a measurement that begins now."""
    for number in range(1000):
        name = folder_name(time.time(), f"{backend} {ranks}", f"{number:03d}")
        path = root / FOLDER / f"{name}.json"
        if not path.exists():
            return path
    raise FileExistsError(f"1000 measurements of this second in {root / FOLDER}")


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """Write a measurement, as a whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, allow_nan=False)
    atomic_write(path, text, durable=False)


def result_names(root: Path) -> list[str]:
    """Return the names of all measurements, newest first."""
    found = (path.stem for path in (root / FOLDER).glob("*.json"))
    return sorted((name for name in found if is_run_id(name)), reverse=True)


def result_label(name: str) -> str:
    """Return a measurement's name as people read it: local time, backend and ranks.

    Names from before Stepscope wrote UTC, with a Z, have local time.

    >>> result_label("20261122-141500-gloo-2-000")
    '2026-11-22 14:15:00, gloo, 2 ranks'
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    stamp, utc, backend, ranks, number = match.groups()
    again = f" ({int(number) + 1})" if int(number) else ""
    try:
        when = datetime.strptime(stamp, "%Y%m%d-%H%M%S").replace(tzinfo=UTC if utc else None)
    except ValueError:  # no date
        return name
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}, {backend}, {ranks} ranks{again}"


def read_result(root: Path, name: str) -> dict[str, Any]:
    """Return a measurement that a user or a URL names. Raises ResultError."""
    path = root / FOLDER / f"{name}.json"
    if not is_run_id(name) or not os.path.isfile(path):
        raise ResultError(f"measurement: none of the name {name[:120]!r}. Pick one from the list.")
    try:
        document = read_json(path, BYTES_LIMIT)
    except (OSError, ValueError) as error:
        raise ResultError(f"measurement: {name} cannot be read ({error}). Delete it.") from error
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise ResultError(f"measurement: {name} has no rows. Delete it.")
    wrong = _wrong_head(document)
    if wrong is not None:
        raise ResultError(f"measurement: {name} cannot be shown ({wrong}). Delete it.")
    document["rows"] = [row for row in document["rows"] if _is_row(row)]
    return document


def _wrong_head(document: Mapping[str, Any]) -> str | None:
    """Say what is wrong with all but the rows; None where nothing is."""
    ranks, backend = document.get("ranks"), document.get("backend")
    if type(ranks) is not int or not 1 <= ranks <= MOST:
        return f"ranks: a whole number from 1 on, got {_short(ranks)}"
    if not isinstance(backend, str):
        return f"backend: a name, got {_short(backend)}"
    machine = document.get("machine") or {}
    if not isinstance(machine, dict):
        return f"machine: an object, got {_short(machine)}"
    if not isinstance(machine.get("device", ""), str):
        return f"machine.device: a name, got {_short(machine['device'])}"
    link = machine.get("link")
    if link is None or (
        isinstance(link, dict)
        and isinstance(link.get("name"), str)
        and _is_measurable(link.get("bytes_per_s"))
    ):
        return None
    return f"machine.link: a name and bytes_per_s, got {_short(link)}"


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("operation"), str):
        return False
    if "reason" in row:
        return isinstance(row["reason"], str) and _is_measurable(row.get("bytes"))
    needed = all(_is_measurable(row.get(key)) for key in ("bytes", "seconds", "algorithm", "bus"))
    return needed and all(_is_measurable(row[key]) for key in SPREAD if key in row)


def _is_measurable(number: Any) -> bool:
    return (
        isinstance(number, int | float)
        and not isinstance(number, bool)
        and LEAST <= number <= MOST  # NaN is not
    )


def _short(value: Any) -> str:
    return repr(value)[:80]
