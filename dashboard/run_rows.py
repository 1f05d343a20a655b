"""The rows of the Runs page, and the disk use of the runs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dashboard.charts import run_view
from stepscope.common.formatting import format_bytes, printable
from stepscope.common.json_values import flattened
from stepscope.recorder.final_values import final_values
from stepscope.run import RunInfo
from stepscope.run.metadata import RunMetadata, read_metadata
from stepscope.store import StoreError

MIB, GIB, J_PER_WH = 2**20, 2**30, 3600.0
MAX_CELLS = 200  # settings and metrics of one run


def row(run: RunInfo, size: int | None) -> dict[str, Any]:
    """Return the cells of a run with files of `size` bytes, by column; None for missing values.

    After the fixed columns follow those of its settings and metrics: `config: lr`,
    `final: val/accuracy`, `best: val/loss`.
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
    """Return the disk use of the runs as a sentence; "" if the free space is unknown."""
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
