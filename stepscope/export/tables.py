"""Export the rows of a run as CSV, Parquet or TensorBoard events.

Reads 64 frames at a time, independent of the run's length; omits rows that arrive meanwhile.
"""

from __future__ import annotations

import csv
import errno
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from stepscope.common.files import atomic_replace
from stepscope.common.json_values import to_json
from stepscope.store import StoreReader
from stepscope.store.blocks import Floats, missing
from stepscope.store.reader import EVERY, StreamRows

ColumnType = Literal["float", "int", "text"]
Column = Floats | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns by name, and their values in batches: lists, or arrays with missing values."""

    columns: Mapping[str, ColumnType]
    batches: Iterator[Sequence[Column]]


def write_csv(out: IO[str], table: Table) -> int:
    """Write CSV with a header; return the number of rows."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_cell(name) for name in table.columns])
    count = 0
    for batch in table.batches:
        pairs = zip(table.columns.values(), batch, strict=True)
        columns = [_csv_column(kind, column) for kind, column in pairs]
        count += len(columns[0])
        writer.writerows(zip(*columns, strict=True))
    return count


def write_parquet(path: Path, table: Table) -> int:
    """Write a Parquet file with one row group per batch; return the number of rows."""
    import pyarrow as pa  # noqa: PLC0415 - 0.15 s, and only this format needs it
    from pyarrow import parquet  # noqa: PLC0415

    types = {"float": pa.float64(), "int": pa.int64(), "text": pa.string()}
    schema = pa.schema([(_utf8(name), types[kind]) for name, kind in table.columns.items()])

    def array(kind: ColumnType, column: Column) -> Any:
        mask = missing(np.asarray(column)) if kind == "float" else None
        values = [_utf8(text) for text in column] if kind == "text" else column
        return pa.array(values, type=types[kind], mask=mask)

    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in table.batches:
            arrays = [array(*pair) for pair in zip(table.columns.values(), batch, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            count += len(arrays[0])
    return count


def _csv_column(kind: ColumnType, column: Column) -> list[Any]:
    """Return the cells of a column: Python values, None for missing ones."""
    if kind == "float":
        values = np.asarray(column)
        cells = values.astype(object)
        cells[missing(values)] = None
        return list(cells)
    return [_cell(text) for text in column] if kind == "text" else list(column)


def _cell(text: str) -> str:
    """Return text that a spreadsheet does not execute as a formula: names are untrusted."""
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else _utf8(text)


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
        with opened(output) as out:
            count = write_csv(out, table)
    return f"{count} rows of {stream} written to {output}."


def series_table(rows: StreamRows) -> Table:
    """Return the rows of a series stream: time, step, the GPU of `devices`, and every metric."""
    columns: dict[str, ColumnType] = {"ts": "float", "step": "int"}
    with_uuid = rows.stream == "devices"
    if with_uuid:
        columns["uuid"] = "text"
    for key in rows.keys:
        while key in columns:
            key += "_"
        columns[key] = "float"

    def batches() -> Iterator[Sequence[Column]]:
        for source, block in rows.slices():
            uuid = [[source] * len(block)] if with_uuid else []
            yield [block.ts, block.step.astype(np.int64).tolist(), *uuid, *block.mean]

    return Table(columns, batches())


def event_table(folder: Path, rank: int) -> Table:
    """Return the events of a run, oldest first."""
    columns: dict[str, ColumnType] = {"ts": "float", "step": "int", "epoch": "int"}
    columns |= {"kind": "text", "text": "text", "data": "text"}
    with StoreReader(folder, rank) as reader:
        rows = [
            (
                *(event.ts, event.step, event.epoch, event.kind, event.text),
                json.dumps(to_json(event.data)),  # with names of non-finite numbers
            )
            for event in reader.events(limit=EVERY)
        ]
    batch = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]
    return Table(columns, iter([batch]))
