"""`stepscope export`: a run's rows as CSV, JSON, Parquet or TensorBoard events.

A run of any length streams through 64 frames at a time; the rows are those that the run had when
the export began.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepscope.export.formats import (
    Column,
    Kind,
    Table,
    opened,
    replacing,
    write_csv,
    write_json,
    write_parquet,
)
from stepscope.export.rows import Rows
from stepscope.recording.recovery import recover_ended
from stepscope.run import read_run, run_folder
from stepscope.store import RunReader, StoreError

EVERY = 2**62
"""As a limit: events are few, thousands in a long run, so they are read at once."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export: a format, a stream, a rank."""

    format: str
    stream: str
    rank: int = 0


def export(root: Path, run_id: str, wanted: Wanted, output: Path | None) -> int:
    """Export a run; return the exit code. Raises RunError for an unknown run."""
    folder = run_folder(root, run_id)
    problem = _usage_problem(wanted, output)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    recover_ended(read_run(folder))
    try:
        written = _export(folder, wanted, output)
    except BrokenPipeError:  # an OSError too, but of the reader's will
        raise
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        reason = error.strerror or error
        print(f"--output: cannot be written ({reason}), got {output}.", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("pyarrow", "tensorboard"):
            raise
        print(
            f"--format {wanted.format}: needs the package {package}, which is not installed. "
            f"Run 'pip install {package}'.",
            file=sys.stderr,
        )
        return 1
    if output is not None:
        print(written)
    return 0


def _usage_problem(wanted: Wanted, output: Path | None) -> str | None:
    if wanted.format in ("parquet", "tensorboard") and output is None:
        what = "a file" if wanted.format == "parquet" else "a log directory"
        return f"--output: --format {wanted.format} needs {what}, got none. Add --output NAME."
    if wanted.format == "tensorboard" and wanted.stream == "events":
        return "--stream: TensorBoard holds numbers only, got events. Use csv, json or parquet."
    return None


def _export(folder: Path, wanted: Wanted, output: Path | None) -> str:
    """Write the export; return the sentence that says so."""
    rows = Rows(folder, wanted.stream, wanted.rank)
    if wanted.format == "tensorboard" and output is not None:
        from stepscope.export.tensorboard import (  # noqa: PLC0415 - only here it is needed
            write_events,
        )

        place = write_events(rows, folder.name, output, rank=wanted.rank)
        return f"{len(rows)} rows of {wanted.stream} written below {place}."
    table = event_table(folder, wanted.rank) if wanted.stream == "events" else series_table(rows)
    if wanted.format == "parquet" and output is not None:
        with replacing(output) as part:
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
    """Return a metric's column name: its key, or one with "_" behind where that is taken."""
    while key in taken:
        key += "_"
    return key


def event_table(folder: Path, rank: int) -> Table:
    """Return the events of a run, oldest first."""
    columns: dict[str, Kind] = {
        "ts": "float",
        "step": "int",
        "epoch": "int",
        "kind": "text",
        "text": "text",
        "data": "json",
    }
    with RunReader(folder, rank) as reader:
        events = reader.events(limit=EVERY)
    batch = [[getattr(event, name) for event in events] for name in columns]
    return Table(columns, iter([batch]))
