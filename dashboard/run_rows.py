"""Rows of the Runs page, and the search of `lr>0.01 val/loss<0.3 status=failed` in them."""

from __future__ import annotations

import contextlib
import operator
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dashboard.charts import run_view
from stepscope.common.formatting import format_bytes, printable
from stepscope.common.json_values import flattened
from stepscope.run import RunInfo, read_metadata
from stepscope.run.info import RunMetadata, shown_status
from stepscope.store import StoreError
from stepscope.store.final_values import final_values

MIB = 2**20
GIB = 2**30
J_PER_WH = 3600.0
MAX_CELLS = 200  # settings and metrics of one run
MAX_SEARCHED_CHARS = 20_000

Cell = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: `cells` by column, `created` in epoch seconds, `duration` in seconds.

    `root` is the folder of its run folder. A search finds the casefolded texts in `words`, and in
    `named` the cells by their names in a query: lr, best_loss or config:lr.
    """

    id: str
    root: str
    live: bool
    pinned: bool
    created: float
    duration: float | None
    cells: dict[str, Cell]
    named: dict[str, Cell]
    words: str


def row_of(run: RunInfo, size: int | None) -> RunRow:
    """Return the row of a run with files of `size` bytes, None if unknown."""
    cells = cells_of(run, size)
    ended = time.time() if run.status.live else run.ended
    duration = None if ended is None else max(0, round(ended - run.created))
    started = datetime.fromtimestamp(run.created).isoformat(" ", "minutes")
    named: dict[str, Cell] = {"duration": duration, "started": started}
    named |= {_folded(column): cell for column, cell in cells.items()}
    for column, cell in cells.items():
        named.setdefault(_folded(column).removeprefix("config:").removeprefix("final:"), cell)
    texts = [
        f"{column.removeprefix('config: ')}={cell}" if column.startswith("config: ") else cell
        for column, cell in cells.items()
        if isinstance(cell, str) or column.startswith("config: ")
    ]
    return RunRow(
        id=run.id,
        root=str(run.folder.parent),
        live=run.status.live,
        pinned=cells["Pinned"],
        created=run.created,
        duration=duration,
        cells=cells,
        named=named,
        words="\n".join([run.id, *texts])[:MAX_SEARCHED_CHARS].casefold(),
    )


def _folded(column: str) -> str:
    return column.casefold().replace(": ", ":").replace(" ", "_")


def cells_of(run: RunInfo, size: int | None) -> dict[str, Any]:
    """Return the cells of a run with files of `size` bytes, by column; None for missing values.

    The fixed columns precede settings and metrics: `config: lr`, `final: val/accuracy`, `best: …`.
    """
    metadata = whole_metadata(run)
    totals = metadata.totals or {}
    final = metadata.final or {}
    git = metadata.git
    best = (final[key].best for key in ("val/loss", "train/loss") if key in final)

    def total(name: str, unit: float = 1.0) -> float | None:
        return totals[name] / unit if name in totals else None

    cells = {
        "Name": run_view.run_name(run),
        "Status": shown_status(run.status, metadata),
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
    return read_metadata(with_totals(run))


def with_totals(run: RunInfo) -> RunInfo:
    """Return the run with the values of the whole run, which a killed one has not written."""
    if "totals" not in run.run_json:
        with contextlib.suppress(StoreError):  # neither numbers nor a reason: the run page names it
            return replace(run, run_json=run.run_json | final_values(run.folder, run.run_json))
    return run


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


def search(rows: Sequence[RunRow], query: str) -> tuple[list[RunRow], str | None]:
    """Return the rows with all words and conditions of a query, in any order and case.

    Also returns which condition no row can satisfy, or None.
    """
    found = list(rows)
    problem = None
    for word in query.casefold().split():
        match = _CONDITION.fullmatch(word)
        if match is not None:
            name = match[1].replace(":_", ":")
            if not any(name in row.named for row in rows):
                problem = f"No column of these runs is named {name}."
            found = [row for row in found if _compares(row.named.get(name), match[2], match[3])]
            continue
        if re.search("[<>=]", word):
            problem = f"{word}: a condition is a column, one of <, <=, >, >= and =, and a value."
        found = [row for row in found if word.removeprefix("#") in row.words]
    return found, problem


def _compares(cell: Cell, compare: str, value: str) -> bool:
    if cell is None:
        return False
    if isinstance(cell, str) and _DATE.match(cell) and _DATE.match(value):
        return _COMPARE[compare](cell[: len(value)], value)
    try:
        if _COMPARE[compare](float(cell), float(value)):
            return True
    except ValueError:  # a text, of which a part is enough
        return compare == "=" and value in str(cell).casefold()
    return compare == "=" and value == str(cell).casefold()  # nan
