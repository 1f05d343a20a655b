"""Export all runs of a folder as Parquet files that one query reads together.

The files of a stream have the same columns, in the same order: a metric that a run does not have is
null in its file. So no reader needs to merge schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from stepscope.export.tables import (
    Column,
    ColumnType,
    Table,
    event_table,
    free_name,
    output_file,
    series_table,
    write_parquet,
)
from stepscope.recorder.recovery import recover_ended
from stepscope.run import RunError, RunInfo, read_run, run_folders
from stepscope.run.rank_info import numbers_with
from stepscope.store import StoreError
from stepscope.store.reader import StreamRows

RUNS_FILE = "runs.parquet"
_RANK_FILE = re.compile(r"(.+)\.rank\d+\.parquet")


def export_all(root: Path, output: Path, streams: Iterable[str]) -> Iterator[str]:
    """Write `output`/STREAM/RUN.rankK.parquet of all runs and runs.parquet; replace earlier files.

    Files of runs that no longer exist are deleted at the end. Those of runs and ranks that cannot
    be read stay. Yields a sentence for each of these. Raises RunError without runs, OSError, and
    ModuleNotFoundError without pyarrow.
    """
    import pyarrow  # noqa: F401, PLC0415 - no file may change without it

    folders = list(run_folders(root))
    if not folders:
        raise RunError(f"export: no runs in {root}. Set STEPSCOPE_RUNS to the folder of your runs.")
    earlier = (output / RUNS_FILE).exists()
    runs: list[RunInfo] = []
    unread: set[str] = set()
    for folder in folders:
        try:
            runs.append(read_run(folder))
            recover_ended(runs[-1])
        except RunError as error:
            unread.add(folder.name)
            yield str(error)
    kept: dict[Path, set[str]] = {}
    for stream in streams:
        folder = output / stream
        folder.mkdir(parents=True, exist_ok=True)
        kept[folder] = set()
        yield from _export_stream(runs, stream, folder, kept[folder])
    with output_file(output / RUNS_FILE) as part:
        write_parquet(part, run_table(runs))
    for path in (path for folder in kept for path in folder.iterdir()) if earlier else ():
        found = _RANK_FILE.fullmatch(path.name)
        if found is None or found[1] in unread or path.name in kept[path.parent]:
            continue
        if path.is_file():
            path.unlink()


def _export_stream(
    runs: Sequence[RunInfo], stream: str, folder: Path, kept: set[str]
) -> Iterator[str]:
    """Write a file for each rank with rows; yield a sentence for each that cannot be read.

    The names of the files of both are added to `kept`.
    """
    found: dict[tuple[str, int], StreamRows] = {}
    for run in runs:
        for rank in numbers_with(run.folder, "sqlite"):
            try:
                found[run.id, rank] = StreamRows(run.folder, stream, rank)
            except StoreError as error:
                kept.add(_name(run.id, rank))
                yield str(error)
    keys = sorted({key for rows in found.values() for key in rows.keys})
    for (run_id, rank), rows in found.items():
        try:
            if stream == "events":
                table = event_table(rows.folder, rank)
            elif not len(rows):
                continue
            else:
                table = series_table(rows, keys)
            kept.add(_name(run_id, rank))
            with output_file(folder / _name(run_id, rank)) as part:
                write_parquet(part, labeled(table, {"run": run_id, "rank": rank}))
        except StoreError as error:
            kept.add(_name(run_id, rank))
            yield str(error)


def _name(run_id: str, rank: int) -> str:
    """Return the name of a rank's file, as _RANK_FILE matches it."""
    return f"{run_id}.rank{rank}.parquet"


def labeled(table: Table, labels: Mapping[str, str | int]) -> Table:
    """Return a table with a constant column for each label, before its own columns."""
    columns: dict[str, ColumnType] = {
        name: "text" if isinstance(value, str) else "int" for name, value in labels.items()
    }
    for name, kind in table.columns.items():
        columns[free_name(name, columns)] = kind

    def batches() -> Iterator[Sequence[Column]]:
        for batch in table.batches:
            yield [*([value] * len(batch[0]) for value in labels.values()), *batch]

    return Table(columns, batches())


def run_table(runs: Iterable[RunInfo]) -> Table:
    """Return a row for each run: its id, name, status, start, end, and its settings as JSON."""
    columns: dict[str, ColumnType] = {"run": "text", "name": "text", "status": "text"}
    columns |= {"created": "float", "ended": "float", "config": "json"}
    rows = [
        (
            run.id,
            str(run.run_json.get("name") or run.id),
            run.status.value,
            run.created,
            float("nan") if run.ended is None else run.ended,
            run.run_json.get("config") or {},
        )
        for run in runs
    ]
    batch = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]
    return Table(columns, iter([batch]))
