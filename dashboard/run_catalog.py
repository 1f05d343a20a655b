"""Rows of the Runs page, and the search of `lr>0.01 val/loss<0.3 status=failed` in them.

The rows of ended runs are kept in CATALOG, each with the modification time of its run folder, in
which every file is replaced or created. It is rebuilt if missing, damaged, or of another version.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dashboard.charts import run_view
from dashboard.run_index import MAX_READ, is_final, is_settled
from stepscope.common.files import atomic_write, is_own_folder, modified_ns, read_regular_file
from stepscope.common.formatting import format_bytes, printable
from stepscope.common.json_values import flattened
from stepscope.run import RunError, RunInfo, check_readable, is_run_id, read_metadata, read_run
from stepscope.run.metadata import RunMetadata
from stepscope.run.rank_info import now_of
from stepscope.run.retention import folder_size
from stepscope.store import STORE_NAME, StoreError
from stepscope.store.final_values import final_values

log = logging.getLogger(__name__)

CATALOG = ".stepscope-runs"
VERSION = 3  # of the rows in CATALOG
MAX_BYTES = 2**28
MAX_UNSAVED = 100  # rows that are read again after a restart of the server
REREAD_S = 1.0  # minimum age of the row of a live run that is read again
MIB, GIB, J_PER_WH = 2**20, 2**30, 3600.0
MAX_CELLS = 200  # settings and metrics of one run

Cell = bool | int | float | str | None


class RunRow(msgspec.Struct):
    """One run: `cells` by column, `created` in epoch seconds, `duration` in seconds.

    `final` is True if the row changes only together with `stamp`, the folder's time in ns.
    """

    id: Annotated[str, msgspec.Meta(max_length=100)]
    stamp: Annotated[int, msgspec.Meta(ge=0)]
    final: bool
    live: bool
    pinned: bool
    created: Annotated[float, msgspec.Meta(ge=0, lt=4_102_444_800)]
    duration: Annotated[float, msgspec.Meta(ge=0, lt=1e10)] | None
    cells: dict[str, Cell]
    words: str
    """Casefolded texts that a search finds."""
    root: str = ""
    """The folder of the run folder; not in CATALOG."""


class _Saved(msgspec.Struct):
    version: int
    rows: Annotated[list[RunRow], msgspec.Meta(max_length=200_000)]


class RunCatalog:
    """The rows of one folder; `is_mirror` for the runs of another host. Thread-safe."""

    def __init__(self, folder: Path, *, is_mirror: bool = False) -> None:
        self._folder, self._is_mirror = folder, is_mirror
        self._lock = threading.Lock()
        self._rows: dict[str, RunRow | int] = {}  # the stamp of a folder that cannot be read
        self._unread: dict[str, str] = {}  # why a run cannot be read
        self._looked: dict[str, float] = {}  # last read of each live run, monotonic
        self._loaded = False
        self._unsaved = 0
        self._modified = -1

    def rows(self, *, check: bool) -> list[RunRow]:
        """Return the rows of all runs; `check` looks for changes of ended runs too."""
        with self._lock:
            if not self._loaded:
                self._load()
            self._update(check)
            if self._unsaved >= MAX_UNSAVED:
                self._save()
            rows = [found for found in self._rows.values() if isinstance(found, RunRow)]
            for row in rows:
                row.root = str(self._folder)
            return rows

    def unreadable(self) -> list[str]:
        """Return why the folder, and runs of the last `rows`, cannot be read, a sentence each."""
        found = []
        if not self._is_mirror:
            try:
                check_readable(self._folder)
            except RunError as error:
                found.append(str(error))
        with self._lock:
            return [*found, *self._unread.values()]

    def forget(self, run_id: str) -> None:
        with self._lock:
            if run_id in self._rows:
                self._rows[run_id] = 0

    def _update(self, check: bool) -> None:
        modified, known, now = modified_ns(self._folder), self._rows, time.monotonic()
        if check:
            self._rows |= dict.fromkeys(self._unread, 0)  # a change of rights changes no time
        if modified != self._modified:
            try:
                names = sorted(filter(is_run_id, os.listdir(self._folder)), reverse=True)
            except OSError:  # missing or unreadable: there are no runs
                names = []
            self._rows = {name: known.get(name, 0) for name in names}
            self._unread = {name: self._unread[name] for name in names if name in self._unread}
            self._modified = modified if is_settled(modified) else -1
        live = {name for name, row in self._rows.items() if isinstance(row, RunRow) and row.live}
        self._looked = {name: self._looked.get(name, now) for name in live}
        due = [name for name in live if now - self._looked[name] >= REREAD_S]
        for name in sorted(due, key=self._looked.__getitem__)[:MAX_READ]:
            self._looked[name] = now
            self._read(name, self._stamp(name))
        for name, found in list(self._rows.items()):
            stamped = found if isinstance(found, int) else found.stamp
            if name not in live and (check or isinstance(found, int) or not found.final):
                stamp = self._stamp(name)
                if stamp != stamped:
                    self._read(name, stamp)

    def _stamp(self, name: str) -> int:
        """Return the modification time; a mirrored store grows in place."""
        stamp = modified_ns(f"{self._folder}/{name}")
        return max(stamp, self._is_mirror and modified_ns(f"{self._folder}/{name}/{STORE_NAME}"))

    def _read(self, name: str, stamp: int) -> None:
        before = self._rows[name]
        self._unread.pop(name, None)
        try:
            self._rows[name] = found = self._row(self._folder / name, stamp)
            self._unsaved += found.final
        except (RunError, OSError) as error:  # logged by RunIndex
            self._rows[name] = stamp
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                self._unread[name] = str(error)
        except Exception:  # one untrusted folder must not hide all others
            self._rows[name] = stamp
            if isinstance(before, RunRow) or before == 0:
                log.warning("run not listed: %s", name, exc_info=True)

    def _row(self, folder: Path, stamp: int) -> RunRow:
        run = read_run(folder)
        # Of a remote run only a part of its files is here.
        cells = row(run, None if self._is_mirror else folder_size(folder))
        ended = now_of(run.run_json) if run.status.live else run.ended
        texts = [
            f"{key.removeprefix('config: ')}={cell}" if key.startswith("config: ") else cell
            for key, cell in cells.items()
            if isinstance(cell, str) or key.startswith("config: ")
        ]
        # A change within the same tick of the clock gives no other time: read again until then.
        settled = is_settled(stamp) and stamp == self._stamp(folder.name)
        found = {
            "id": run.id,
            "stamp": stamp if settled else 0,
            "final": settled and is_final(run),
            "live": run.status.live,
            "pinned": cells["Pinned"],
            "created": run.created,
            "duration": None if ended is None else max(0, round(ended - run.created)),
            "cells": cells,
            "words": "\n".join([run.id, *texts])[:20_000].casefold(),
        }
        return msgspec.convert(found, RunRow)  # an invalid row would make CATALOG unusable

    def _load(self) -> None:
        self._loaded = True
        if is_own_folder(self._folder):
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                data = read_regular_file(self._folder / CATALOG, MAX_BYTES)
                saved = msgspec.msgpack.decode(data, type=_Saved)
                if saved.version == VERSION:
                    self._rows = {row.id: row for row in saved.rows}

    def _save(self) -> None:
        self._unsaved = 0
        rows = [row for row in self._rows.values() if isinstance(row, RunRow) and row.final]
        if is_own_folder(self._folder):
            with contextlib.suppress(OSError):  # a full disk: the next server reads them again
                data = msgspec.msgpack.encode(_Saved(VERSION, rows))
                atomic_write(self._folder / CATALOG, data, durable=False)


def row(run: RunInfo, size: int | None) -> dict[str, Any]:
    """Return the cells of a run with files of `size` bytes, by column; None for missing values.

    The fixed columns precede settings and metrics: `config: lr`, `final: val/accuracy`, `best: …`.
    """
    metadata = whole_metadata(run)
    totals, final, git = metadata.totals or {}, metadata.final or {}, metadata.git
    best = (final[key].best for key in ("val/loss", "train/loss") if key in final)

    def total(name: str, unit: float = 1.0) -> float | None:
        return totals[name] / unit if name in totals else None

    cells = {
        "Name": run_view.run_name(run),
        "Status": run.status.value,
        "Kind": run_view.KINDS[run_view.run_kind(run)],
        "Tags": ", ".join(metadata.tags) or None,
        "Group": metadata.group,
        "Pinned": metadata.pinned,
        "Ranks": run.world_size,
        "Device": _device_name(run),
        "Precision": _cell(metadata.config.get("precision")),
        "Steps": run.run_json.get("step"),
        "Best loss": next((loss for loss in best if loss is not None), None),
        "Samples/s": total("samples_per_s"),
        "Peak allocated": total("peak_allocated", GIB),
        "Peak process": total("peak_process", GIB),
        "Energy": total("energy", J_PER_WH),
        "Size": None if size is None else size / MIB,
        "Commit": None if git is None else git.commit[:12] + ("*" if git.dirty else ""),
        "Note": metadata.note,
    }
    own: dict[str, Any] = {f"final: {key}": value.last for key, value in final.items()}
    own |= {f"best: {key}": value.best for key, value in final.items()}
    own |= {f"config: {name}": _cell(value) for name, value in flattened(metadata.config).items()}
    shown = [(name, value) for name, value in own.items() if value is not None]
    cells |= {printable(name)[: run_view.NAME_LENGTH]: value for name, value in shown[:MAX_CELLS]}
    return {
        name: printable(cell) if isinstance(cell, str) else cell for name, cell in cells.items()
    }


def whole_metadata(run: RunInfo) -> RunMetadata:
    """Return the metadata with the values of the whole run, of the store if run.json has none."""
    if "totals" not in run.run_json:
        with contextlib.suppress(StoreError):  # neither numbers nor a reason: the run page names it
            run = replace(run, run_json=run.run_json | final_values(run.folder, run.run_json))
    return read_metadata(run)


def _cell(value: Any) -> bool | float | str | None:
    """Return a setting as a cell, a long text cut; None for lists."""
    if isinstance(value, str) and len(value) > run_view.NAME_LENGTH:
        return f"{value[: run_view.NAME_LENGTH - 1]}…"
    return value if isinstance(value, bool | int | float | str) else None


def disk_use(folder: Path, sizes: Sequence[int]) -> str:
    """Return the disk use of `sizes` (bytes) as a sentence; "" if the free space is unknown."""
    try:
        free = format_bytes(shutil.disk_usage(folder).free)
    except OSError:
        return ""
    listed = f"The {len(sizes)} listed runs use" if len(sizes) > 1 else "The listed run uses"
    return f"{listed} {format_bytes(sum(sizes))}; {free} are free. `stepscope gc` deletes old runs."


def _device_name(run: RunInfo) -> str | None:
    """Return "CPU" or the GPU's name; None without training, or before its device is known."""
    device = run_view.training_device(run)
    if device in (None, "cpu"):
        return "CPU" if device else None
    names = {gpu.uuid: gpu.name for gpu in run_view.run_content(run).gpus}
    return names.get(device, device)


_CONDITION = re.compile(r"([^<>=!]+)(<=|>=|<|>|=)([^<>=!]+)")
_DATE = re.compile(r"\d{4}-\d\d")  # dates of this form are in the order of their texts
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
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
            found = [row for row in found if word.removeprefix("#") in row.words]
        else:
            name, compare, value = match.groups()
            found = [
                row
                for row in found
                if any(_compares(cell, compare, value) for cell in _cells(row, name))
            ]
    return found


def hint(rows: Iterable[RunRow], query: str) -> str | None:
    """Return which condition of a query no row can satisfy, or None."""
    listed = list(rows)
    for word in query.casefold().split():
        match = _CONDITION.fullmatch(word)
        if match is None and re.search("[<>=]", word):
            return f"{word}: a condition is a column, one of <, <=, >, >= and =, and a value."
        if match is not None and not any(_cells(row, match[1]) for row in listed):
            return f"No column of these runs is named {match[1]}."
    return None


def _cells(row: RunRow, name: str) -> list[Cell]:
    """Return the cells of a column: lr, best_loss or config:lr; the fixed one before others."""
    if name == "duration":
        return [row.duration]
    if name == "started":
        return [datetime.fromtimestamp(row.created).isoformat(" ", "minutes")]
    asked = name.replace(":_", ":")
    named = [(_names(column), cell) for column, cell in row.cells.items()]
    whole = [cell for (folded, _), cell in named if folded == asked]
    return whole or [cell for (_, short), cell in named if short == asked]


@functools.lru_cache(maxsize=10_000)
def _names(column: str) -> tuple[str, str]:
    folded = column.casefold().replace(": ", ":").replace(" ", "_")
    return folded, re.sub("^(config|final):", "", folded)


def _compares(cell: Cell, compare: str, value: str) -> bool:
    if isinstance(cell, str) and _DATE.match(cell) and _DATE.match(value):
        return _COMPARE[compare](cell[: len(value)], value)
    try:
        if cell is None or _COMPARE[compare](float(cell), float(value)):
            return cell is not None
        return compare == "=" and value == str(cell).casefold()  # nan
    except (TypeError, ValueError):  # a text, of which a part is enough
        return compare == "=" and value in str(cell).casefold()
