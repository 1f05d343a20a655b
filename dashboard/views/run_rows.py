"""The rows of the runs page: a cell's value by its column's title; pure."""

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
    """Return the cells of a run by their column's title; None where there is no value."""
    config = run.run_json.get("config")
    ended = now_of(run.run_json) if run.status.live else run.ended
    return {
        "Name": run_name(run),
        "Status": run.status.value,
        "Kind": KINDS[run_kind(run)],
        "Ranks": ranks_label(run),
        "Device": device_name(run),
        "Precision": config.get("precision") if isinstance(config, dict) else None,
        "Steps": run.run_json.get("step"),
        "Best loss": summary.best_loss,
        "Samples/s": summary.samples_per_s,
        "Peak allocated": _gib(summary.peak_allocated),
        "Peak process": _gib(summary.peak_process),
        "Started": datetime.fromtimestamp(run.created),
        "Duration": _duration(run.created, ended),
    }


def ranks_label(run: RunInfo) -> str | None:
    """Return "4", or "4 · DDP" of a run of ours; None for one process."""
    ranks = world_size_of(run.run_json)
    if ranks < 2:
        return None
    config = run.run_json.get("config")
    parallel = config.get("strategy") if isinstance(config, dict) else None
    return f"{ranks} · {parallel.upper()}" if parallel in ("ddp", "fsdp") else str(ranks)


def device_name(run: RunInfo) -> str | None:
    """Return "CPU" or the GPU's name; None where nothing is trained, or nobody knows yet where."""
    device = training_device(run)
    if device in (None, "cpu"):
        return "CPU" if device else None
    names = {gpu.uuid: gpu.name for gpu in run_content(run).gpus}
    return names.get(device, device)


def _gib(size: float | None) -> float | None:
    return None if size is None else size / GIB


def _duration(began: float, ended: float | None) -> timedelta | None:
    return None if ended is None else timedelta(seconds=max(0, round(ended - began)))
