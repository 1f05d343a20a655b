"""Files of measured collectives: a JSON document each, in `collectives` of the runs' folder."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import atomic_write, read_json
from stepscope.run import folder_name, is_run_id

FOLDER = "collectives"
SCHEMA = 1
MAX_BYTES = 16 * 2**20
_NAME = re.compile(r"(\d{8}-\d{6})(Z?)-([a-z]+)-(\d+)-(\d{3})")

# Seconds, bytes and bytes/s that fit a logarithmic axis.
_Measured = Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]


class ResultError(Exception):
    """A file that is not a measurement; the message is one sentence with a remedy."""


class _Link(msgspec.Struct):
    name: str
    bytes_per_s: _Measured


class _Machine(msgspec.Struct):
    device: str = ""
    link: _Link | None = None


class _Document(msgspec.Struct):
    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    backend: str
    rows: list[Any]
    machine: _Machine | None = None


class _Row(msgspec.Struct):
    operation: str
    bytes: _Measured
    seconds: _Measured
    algorithm: _Measured
    bus: _Measured
    fastest_s: _Measured = 1.0
    slowest_s: _Measured = 1.0


class _NotMeasured(msgspec.Struct):
    operation: str
    bytes: _Measured
    reason: str


def new_result_path(root: Path, backend: str, ranks: int) -> Path:
    """Return an unused path for a measurement that starts now."""
    for number in range(1000):
        name = folder_name(time.time(), f"{backend} {ranks}", f"{number:03d}")
        path = root / FOLDER / f"{name}.json"
        if not path.exists():
            return path
    raise FileExistsError(f"1000 measurements of this second in {root / FOLDER}")


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """Write a measurement atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(document, indent=1, allow_nan=False), durable=False)


def result_names(root: Path) -> list[str]:
    """Return the names of all measurements, newest first."""
    found = (path.stem for path in (root / FOLDER).glob("*.json"))
    return sorted((name for name in found if is_run_id(name)), reverse=True)


def result_label(name: str) -> str:
    """Return the local time, backend and ranks of a measurement from its name.

    Names without a Z after the time are in local time.

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
    except ValueError:
        return name
    return f"{when.astimezone():%Y-%m-%d %H:%M:%S}, {backend}, {ranks} ranks{again}"


def read_result(root: Path, name: str) -> dict[str, Any]:
    """Return the measurement with this name, without its invalid rows. Raises ResultError."""
    path = root / FOLDER / f"{name}.json"
    if not is_run_id(name) or not os.path.isfile(path):
        raise ResultError(f"measurement: {name[:120]!r} does not exist. Choose one from the list.")
    try:
        document: dict[str, Any] = read_json(path, MAX_BYTES)
        msgspec.convert(document, _Document)
    except (OSError, ValueError) as error:
        raise ResultError(f"measurement: {name} cannot be read ({error}). Delete it.") from error
    document["rows"] = [row for row in document["rows"] if _is_row(row)]
    return document


def _is_row(row: Any) -> bool:
    kind = _NotMeasured if isinstance(row, dict) and "reason" in row else _Row
    try:
        msgspec.convert(row, kind)
    except msgspec.ValidationError:
        return False
    return True
