"""Export the rows of a run as CSV, JSON, Parquet or TensorBoard events.

Reads 64 frames at a time, independent of the run's length. Rows that arrive during the export are
omitted.
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
from stepscope.store import StoreReader
from stepscope.store.blocks import Floats, missing
from stepscope.store.reader import EVERY, StreamRows

T = TypeVar("T")
ColumnType = Literal["float", "int", "text", "json"]
Column = Floats | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns by name, and their values in batches: lists, or arrays with missing values."""

    columns: Mapping[str, ColumnType]
    batches: Iterator[Sequence[Column]]

    def converted(self, convert: Callable[[ColumnType, Column], T]) -> Iterator[list[T]]:
        """Yield the converted columns of each batch."""
        for batch in self.batches:
            pairs = zip(self.columns.values(), batch, strict=True)
            yield [convert(kind, column) for kind, column in pairs]


def write_csv(out: IO[str], table: Table) -> int:
    """Write CSV with a header; return the number of rows."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_cell(name) for name in table.columns])
    count = 0
    for columns in table.converted(_csv_column):
        count += len(columns[0])
        writer.writerows(zip(*columns, strict=True))
    return count


def write_json(out: IO[str], table: Table) -> int:
    """Write an array with one object per row and line; return the number of rows."""
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
    """Write a Parquet file with one row group per batch; return the number of rows."""
    import pyarrow as pa  # noqa: PLC0415 - 0.15 s, and only this format needs it
    from pyarrow import parquet  # noqa: PLC0415

    types = {"float": pa.float64(), "int": pa.int64(), "text": pa.string(), "json": pa.string()}
    schema = pa.schema([(_utf8(name), types[kind]) for name, kind in table.columns.items()])

    def array(kind: ColumnType, column: Column) -> Any:
        mask = missing(np.asarray(column)) if kind == "float" else None
        values = column if kind in ("float", "int") else _text_column(kind, column)
        return pa.array(values, type=types[kind], mask=mask)

    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for arrays in table.converted(array):
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            count += len(arrays[0])
    return count


def _csv_column(kind: ColumnType, column: Column) -> Sequence[Any]:
    if kind == "float":
        return _with_none(np.asarray(column))
    if kind == "int":
        return list(column)
    return [_cell(text) for text in _text_column(kind, column)]


def _json_column(kind: ColumnType, column: Column) -> Sequence[Any]:
    if kind == "float":
        values = np.asarray(column)
        cells = _with_none(values)
        for index in np.flatnonzero(~np.isfinite(values)):
            cells[index] = _valid_json(cells[index])
        return cells
    return [_valid_json(value) for value in column] if kind == "json" else list(column)


def _text_column(kind: ColumnType, column: Column) -> list[str]:
    if kind == "json":
        return [json.dumps(_valid_json(value)) for value in column]
    return [_utf8(text) for text in column]


def _with_none(values: Floats) -> list[Any]:
    """Return Python floats, None for missing values."""
    cells = values.astype(object)
    cells[missing(values)] = None
    return list(cells)


def _valid_json(value: Any) -> Any:
    """Replace non-finite numbers, which JSON lacks, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return number_name(value)
    if isinstance(value, dict):
        return {key: _valid_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_valid_json(entry) for entry in value]
    return value


def _cell(text: str) -> str:
    """Return text that a spreadsheet does not execute as a formula: names are untrusted."""
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _utf8(text: str) -> str:
    """Return text in valid UTF-8: a lone surrogate becomes its escape sequence."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextmanager
def opened(output: Path | None) -> Iterator[IO[str]]:
    """Yield a text file: standard output, or a new file that replaces `output` at the end."""
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
    """Yield a path that replaces `path` at the end; after an error `path` is unchanged.

    A device or a pipe, such as /dev/null, is written directly.
    """
    path = path.resolve()  # a link stays a link
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if path.exists() and not path.is_file():
        yield path
        return
    with atomic_replace(path) as part:
        yield Path(part.name)


def export(folder: Path, format_: str, stream: str, rank: int, output: Path | None) -> str:
    """Write the export, without `output` to standard output; return a sentence for the user.

    Raises StoreError if the store cannot be read, OSError if the file cannot be written,
    ModuleNotFoundError if a package for the format is missing.
    """
    rows = StreamRows(folder, stream, rank)
    if format_ == "tensorboard" and output is not None:
        from stepscope.export import tensorboard  # noqa: PLC0415 - only this format needs it

        place = tensorboard.write_events(rows, folder.name, output, rank=rank)
        return f"{len(rows)} rows of {stream} written below {place}."
    table = event_table(folder, rank) if stream == "events" else series_table(rows)
    if format_ == "parquet" and output is not None:
        with output_file(output) as part:
            count = write_parquet(part, table)
    else:
        write = write_csv if format_ == "csv" else write_json
        with opened(output) as out:
            count = write(out, table)
    return f"{count} rows of {stream} written to {output}."


# --- tables ---------------------------------------------------------------------------------------


def series_table(rows: StreamRows, keys: Sequence[str] | None = None) -> Table:
    """Return the rows of a series stream: time, step, the GPU of `devices`, and these metrics.

    `keys` may have metrics that the rows lack; None means all metrics of the rows.
    """
    keys = rows.keys if keys is None else keys
    columns: dict[str, ColumnType] = {"ts": "float", "step": "int"}
    with_uuid = rows.stream == "devices"
    if with_uuid:
        columns["uuid"] = "text"
    for key in keys:
        columns[free_name(key, columns)] = "float"

    def batches() -> Iterator[Sequence[Column]]:
        for source, block in rows.slices(keys):
            uuid = [[source] * len(block)] if with_uuid else []
            yield [block.ts, block.step.astype(np.int64).tolist(), *uuid, *block.mean]

    return Table(columns, batches())


def free_name(key: str, taken: Mapping[str, ColumnType]) -> str:
    """Return a metric's column name: its key, with "_" appended while it is taken."""
    while key in taken:
        key += "_"
    return key


def event_table(folder: Path, rank: int) -> Table:
    """Return the events of a run, oldest first."""
    columns: dict[str, ColumnType] = {"ts": "float", "step": "int", "epoch": "int"}
    columns |= {"kind": "text", "text": "text", "data": "json"}
    with StoreReader(folder, rank) as reader:
        events = reader.events(limit=EVERY)
    batch = [[getattr(event, name) for event in events] for name in columns]
    return Table(columns, iter([batch]))
