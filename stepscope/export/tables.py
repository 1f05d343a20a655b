"""The rows of a run as CSV, JSON, Parquet or TensorBoard events.

A run of any length is read 64 frames at a time. The rows are those that the run had when the
export began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepscope.export.formats import (
    Column,
    Kind,
    Table,
    opened,
    output_file,
    write_csv,
    write_json,
    write_parquet,
)
from stepscope.store import RunReader
from stepscope.store.reader import EVERY
from stepscope.store.rows import Rows


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export: a format, a stream, a rank."""

    format: str
    stream: str
    rank: int = 0


def export(folder: Path, wanted: Wanted, output: Path | None) -> str:
    """Write the export, to standard output without `output`; return a sentence that says so.

    Raises StoreError for a store that cannot be read, OSError for a file that cannot be written,
    ModuleNotFoundError where the format needs a package that is not installed.
    """
    rows = Rows(folder, wanted.stream, wanted.rank)
    if wanted.format == "tensorboard" and output is not None:
        from stepscope.export import tensorboard  # noqa: PLC0415 - only this format needs it

        place = tensorboard.write_events(rows, folder.name, output, rank=wanted.rank)
        return f"{len(rows)} rows of {wanted.stream} written below {place}."
    table = event_table(folder, wanted.rank) if wanted.stream == "events" else series_table(rows)
    if wanted.format == "parquet" and output is not None:
        with output_file(output) as part:
            count = write_parquet(part, table)
    else:
        write = write_csv if wanted.format == "csv" else write_json
        with opened(output) as out:
            count = write(out, table)
    return f"{count} rows of {wanted.stream} written to {output}."


# --- tables ---------------------------------------------------------------------------------------


def series_table(rows: Rows) -> Table:
    """Return the rows of a series stream: time, step, the GPU of `devices`, and every metric."""
    columns: dict[str, Kind] = {"ts": "float", "step": "int"}
    with_uuid = rows.stream == "devices"
    if with_uuid:
        columns["uuid"] = "text"
    for key in rows.keys:
        columns[_free_name(key, columns)] = "float"

    def batches() -> Iterator[Sequence[Column]]:
        for source, block in rows.slices():
            uuid = [[source] * len(block)] if with_uuid else []
            yield [block.ts, block.step.astype(np.int64).tolist(), *uuid, *block.mean]

    return Table(columns, batches())


def _free_name(key: str, taken: Mapping[str, Kind]) -> str:
    """Return a metric's column name: its key, with "_" appended where another column has it."""
    while key in taken:
        key += "_"
    return key


def event_table(folder: Path, rank: int) -> Table:
    """Return the events of a run, oldest first."""
    columns: dict[str, Kind] = {"ts": "float", "step": "int", "epoch": "int"}
    columns |= {"kind": "text", "text": "text", "data": "json"}
    with RunReader(folder, rank) as reader:
        events = reader.events(limit=EVERY)
    batch = [[getattr(event, name) for event in events] for name in columns]
    return Table(columns, iter([batch]))
