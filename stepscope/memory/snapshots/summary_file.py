"""A summary as a file: compressed JSON beside its snapshot, read with care.

A run folder may come from somebody else, so reading believes neither sizes nor types.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import json
import math
import os
import types
import typing
import zlib
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_replace, read_regular_file
from stepscope.memory.snapshots.summary import Summary

SCHEMA = 1
BYTES_LIMIT = 16 * 2**20
"""A summary unpacked: 2000 stacks of 64 frames and ten histories have less."""
LISTS_LIMIT, VALUES_LIMIT = 400_000, 2_000_000
"""Lists in the text of a summary, and commas: each becomes an object before its form is checked."""
ITEMS_LIMIT = 400_000
"""Items of a list."""
_LEVEL = 4


def summary_path(snapshot: Path) -> Path:
    """Return where the summary of a snapshot is kept, beside it.

    >>> summary_path(Path("runs/one/snapshot-step-5.pickle")).name
    'snapshot-step-5.summary.json.gz'
    """
    return snapshot.with_name(f"{snapshot.name.removesuffix('.pickle')}.summary.json.gz")


def write_summary(path: Path, summary: Summary, modified_ns: int) -> None:
    """Write a summary in one piece; `modified_ns` is its snapshot's time of change.

    Raises OSError, and ValueError where it is so large that `read_summary` would not read it.
    """
    content = {"schema": SCHEMA, "modified_ns": modified_ns, "summary": _plain(summary)}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    data = text.encode()
    _check_size(data)
    with atomic_replace(path, durable=False) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(gzip.compress(data, _LEVEL, mtime=0))


def read_summary(path: Path, file_size: int, modified_ns: int) -> Summary | None:
    """Return the summary of the snapshot that has this size and time of change.

    None where there is none, it is of another state of the file, or it is not one of ours: it can
    be made again.
    """
    try:
        content = json.loads(_unpacked(path))
        if content["schema"] != SCHEMA or content["modified_ns"] != modified_ns:
            return None
        summary = _made(Summary, content["summary"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, EOFError, zlib.error):
        return None
    assert isinstance(summary, Summary)
    return summary if summary.file_size == file_size and _coherent(summary) else None


def _unpacked(path: Path) -> bytes:
    """Raises OSError for a link or pipe, ValueError where too much comes out."""
    data = read_regular_file(path, BYTES_LIMIT)
    with gzip.open(io.BytesIO(data)) as file:
        text = file.read(BYTES_LIMIT + 1)
    _check_size(text)
    return text


def _check_size(text: bytes) -> None:
    """Raise ValueError where parsing this JSON would take more memory or time than is due."""
    if len(text) > BYTES_LIMIT:
        raise ValueError(f"must have at most {BYTES_LIMIT} bytes")
    if text.count(b"[") + text.count(b"{") > LISTS_LIMIT or text.count(b",") > VALUES_LIMIT:
        raise ValueError(f"must have at most {LISTS_LIMIT} lists and {VALUES_LIMIT} values")


def _plain(value: Any) -> Any:
    """Return a value of dataclasses as lists: field names would be most of the file."""
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _made(kind: Any, value: Any) -> Any:
    """Return a value of this type made of lists. Raises ValueError where it does not fit."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None:
            return None
        (kind,) = [part for part in parts if part is not types.NoneType]
        return _made(kind, value)
    if origin is tuple:
        items = _list(value)
        return (
            tuple(items)
            if parts[0] in _PLAIN and _all(parts[0], items)
            else tuple(_made(parts[0], item) for item in items)
        )
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds, items = _fields(kind), _list(value)
        if len(items) != len(kinds):
            raise ValueError(f"{kind.__name__}: must have {len(kinds)} values, got {len(items)}")
        return kind(*map(_made, kinds, items))
    if kind is float and type(value) is int:
        value = float(value)
    if not _all(kind, [value]):
        raise ValueError(f"must be {kind.__name__}, got {type(value).__name__}")
    return value


_PLAIN = (int, float, str)


def _all(kind: type, values: list[Any]) -> bool:
    """Say whether all values have exactly this type, and numbers a size that can be."""
    if set(map(type, values)) - {kind}:
        return False
    if kind is int:
        return all(-(2**63) <= value < 2**63 for value in values)
    return kind is not float or all(map(math.isfinite, values))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > ITEMS_LIMIT:
        raise ValueError(f"must be a list of at most {ITEMS_LIMIT}, got {type(value).__name__}")
    return value


@functools.cache
def _fields(kind: Any) -> tuple[Any, ...]:
    """Return the types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return tuple(hints[field.name] for field in dataclasses.fields(kind))


def _coherent(summary: Summary) -> bool:
    """Say whether every number of a stack or frame has one, and columns have one length."""
    stacks = [site.stack for site in summary.sites]
    for memory in summary.devices:
        stacks += [part.stack for row in memory.rows for part in row.parts]
    for one in summary.histories:
        stacks += [band.stack for band in one.bands] + [held.stack for held in one.at_peak]
        lines: list[tuple[float, ...]] = [one.live, one.before, one.rest]
        lines += [band.live for band in one.bands]
        lines += [line for line in (one.seconds, one.reserved) if line is not None]
        count = len(one.columns)
        if not 0 <= one.peak_column < count or any(len(line) != count for line in lines):
            return False
        ends = [span.first for span in one.spans] + [span.last for span in one.spans]
        if any(not 0 <= place < count for place in (*ends, *one.ooms)):
            return False
        if any(not 0 <= span.label < len(summary.labels) for span in one.spans):
            return False
    frames = [place for stack in summary.stacks for place in stack]
    return (
        len(summary.modules) == len(summary.stacks)
        and all(-1 <= stack < len(summary.stacks) for stack in stacks)
        and all(0 <= place < len(summary.texts) for place in frames)
        and all(
            part.state in (0, 1, 2) and part.size >= 0
            for memory in summary.devices
            for row in memory.rows
            for part in row.parts
        )
    )
