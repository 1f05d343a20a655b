"""The rows of the Runs page; pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from dashboard.charts.run_view import run_content, run_kind, training_device, world_size_of
from dashboard.controls.run_picker import KINDS, run_name
from dashboard.run_summary import RunSummary
from stepscope.run import RunInfo
from stepscope.run.rank_info import now_of

GIB = 2**30


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
        "Started": datetime.fromtimestamp(run.created),
        "Duration": None
        if ended is None
        else timedelta(seconds=max(0, round(ended - run.created))),
    }


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
