"""The formats of an export: a table becomes CSV, JSON or Parquet, batch by batch.

A missing value is empty in CSV, null in JSON and Parquet. NaN and infinities are "nan" and "inf" in
CSV; "NaN" and "Infinity" in JSON, which has no number for them.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import numpy as np

from stepscope.common.files import atomic_replace
from stepscope.common.formatting import number_name
from stepscope.store.blocks import Floats, missing

T = TypeVar("T")
Kind = Literal["float", "int", "text", "json"]
Column = Floats | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns by name, and their values in batches: lists, or arrays with missing values."""

    columns: Mapping[str, Kind]
    batches: Iterator[Sequence[Column]]

    def converted(self, convert: Callable[[Kind, Column], T]) -> Iterator[list[T]]:
        """Yield the columns of each batch as `convert` makes them."""
        for batch in self.batches:
            pairs = zip(self.columns.values(), batch, strict=True)
            yield [convert(kind, column) for kind, column in pairs]


def write_csv(out: IO[str], table: Table) -> int:
    """Write CSV with a header; return the rows written."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_cell(name) for name in table.columns])
    count = 0
    for columns in table.converted(_csv_column):
        count += len(columns[0])
        writer.writerows(zip(*columns, strict=True))
    return count


def write_json(out: IO[str], table: Table) -> int:
    """Write one array with an object a row and line; return the rows written."""
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    names = list(table.columns)
    count = 0
    out.write("[")
    for columns in table.converted(_json_column):
        for row in zip(*columns, strict=True):
            out.write(("\n" if count == 0 else ",\n") + encode(dict(zip(names, row, strict=True))))
            count += 1
    out.write("\n]\n")
    return count


def write_parquet(path: Path, table: Table) -> int:
    """Write a Parquet file, a row group a batch; return the rows written."""
    import pyarrow as pa  # noqa: PLC0415 - 0.15 s, and only this format needs it
    from pyarrow import parquet  # noqa: PLC0415

    types = {"float": pa.float64(), "int": pa.int64(), "text": pa.string(), "json": pa.string()}
    schema = pa.schema([(_utf8(name), types[kind]) for name, kind in table.columns.items()])

    def array(kind: Kind, column: Column) -> Any:
        mask = missing(np.asarray(column)) if kind == "float" else None
        values = column if kind in ("float", "int") else _text_column(kind, column)
        return pa.array(values, type=types[kind], mask=mask)

    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for arrays in table.converted(array):
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            count += len(arrays[0])
    return count


def _csv_column(kind: Kind, column: Column) -> Sequence[Any]:
    if kind == "float":
        return _with_none(np.asarray(column))
    if kind == "int":
        return list(column)
    return [_cell(text) for text in _text_column(kind, column)]


def _json_column(kind: Kind, column: Column) -> Sequence[Any]:
    if kind == "float":
        values = np.asarray(column)
        cells = _with_none(values)
        for index in np.flatnonzero(~np.isfinite(values)):
            cells[index] = _valid_json(cells[index])
        return cells
    return [_valid_json(value) for value in column] if kind == "json" else list(column)


def _text_column(kind: Kind, column: Column) -> list[str]:
    if kind == "json":
        return [json.dumps(_valid_json(value)) for value in column]
    return [_utf8(text) for text in column]


def _with_none(values: Floats) -> list[Any]:
    """Return Python floats, None for what is missing."""
    cells = values.astype(object)
    cells[missing(values)] = None
    return list(cells)


def _valid_json(value: Any) -> Any:
    """Replace NaN and infinities, for which JSON has no number, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return number_name(value)
    if isinstance(value, dict):
        return {key: _valid_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_valid_json(entry) for entry in value]
    return value


def _cell(text: str) -> str:
    """Return text that a spreadsheet does not run as a formula: names come from users."""
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _utf8(text: str) -> str:
    """Return text that UTF-8 can hold: a lone surrogate becomes its escape sequence."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextmanager
def opened(output: Path | None) -> Iterator[IO[str]]:
    """Give a text file for the export: standard output, or `output` once it is complete."""
    if output is None:
        yield sys.stdout
        return
    with (
        output_file(output) as part,
        part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as out,
    ):
        yield out


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Give a path to write to that replaces `path` at the end; after an error `path` is unchanged.

    What is not a regular file, such as /dev/null or a pipe, is written directly.
    """
    path = path.resolve()  # a link stays a link
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if path.exists() and not path.is_file():
        yield path
        return
    with atomic_replace(path) as part:
        yield Path(part.name)
