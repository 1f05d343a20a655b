"""The rows of the Runs page, and the disk use of the runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from dashboard.charts.run_view import run_content, run_kind, training_device, world_size_of
from dashboard.controls.run_picker import KINDS, run_name
from dashboard.run_summary import RunSummary
from stepscope.common.formatting import format_bytes
from stepscope.run import RunInfo
from stepscope.run.rank_info import now_of

MIB, GIB = 2**20, 2**30


def row(run: RunInfo, summary: RunSummary) -> dict[str, Any]:
    """Return the cells of a run by column; None for missing values."""
    config = run.run_json.get("config")
    config = config if isinstance(config, dict) else {}
    ended = now_of(run.run_json) if run.status.live else run.ended
    allocated, process = summary.peak_allocated, summary.peak_process
    return {
        "Name": run_name(run),
        "Status": run.status.value,
        "Kind": KINDS[run_kind(run)],
        "Ranks": _ranks(world_size_of(run.run_json), config.get("strategy")),
        "Device": _device_name(run),
        "Precision": config.get("precision"),
        "Steps": run.run_json.get("step"),
        "Best loss": summary.best_loss,
        "Samples/s": summary.samples_per_s,
        "Peak allocated": None if allocated is None else allocated / GIB,
        "Peak process": None if process is None else process / GIB,
        "Size": None if summary.size is None else summary.size / MIB,
        "Started": datetime.fromtimestamp(run.created),
        "Duration": None
        if ended is None
        else timedelta(seconds=max(0, round(ended - run.created))),
    }


def disk_use(folder: Path, sizes: Sequence[int]) -> str:
    """Return a sentence with the sum of the sizes in bytes, and the free space of the disk.

    Returns "" if the free space is unknown, such as for a folder that was deleted.
    """
    try:
        free = format_bytes(shutil.disk_usage(folder).free)
    except OSError:
        return ""
    listed = f"The {len(sizes)} listed runs use" if len(sizes) > 1 else "The listed run uses"
    return f"{listed} {format_bytes(sum(sizes))}; {free} are free. `stepscope gc` deletes old runs."


def _ranks(ranks: int, strategy: object) -> str | None:
    """Return "4", or "4 · DDP" for a built-in run; None for a single process."""
    if ranks < 2:
        return None
    return f"{ranks} · {str(strategy).upper()}" if strategy in ("ddp", "fsdp") else str(ranks)


def _device_name(run: RunInfo) -> str | None:
    """Return "CPU" or the GPU's name; None without training, or before its device is known."""
    device = training_device(run)
    if device in (None, "cpu"):
        return "CPU" if device else None
    names = {gpu.uuid: gpu.name for gpu in run_content(run).gpus}
    return names.get(device, device)
