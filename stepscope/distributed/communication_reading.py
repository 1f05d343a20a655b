"""Reads the newest figures of a job's collectives for `communication.py`: a few frames of a store.

They are those of the folder's first rank, whose collectives the charts show too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from stepscope.bottleneck.step_window import READINGS
from stepscope.distributed.communication import Figures, link_of, sentences
from stepscope.distributed.stragglers.reader import in_job
from stepscope.metrics import Stream
from stepscope.run import RunInfo
from stepscope.run.rank_info import torch_rank
from stepscope.store import Block, RunReader, StoreError, store_name

log = logging.getLogger(__name__)

NEWEST = 8
"""Readings whose mean counts, each of the steps of 1 to 64 s."""
STEPS = 512
"""Newest steps that are looked at: one or two frames of the store."""


def communication_text(run: RunInfo) -> str | None:
    """Return what the first rank's collectives cost; None for a process by itself, or unread."""
    if not in_job(run.run_json) or not (run.folder / store_name(0)).is_file():
        return None
    try:
        with RunReader(run.folder, 0) as reader:
            said = sentences(recent_communication(reader, run.run_json))
    except StoreError as error:
        log.warning("%s: what collectives cost cannot be read: %s", run.id, error)
        return None
    if not said:
        return None
    return f"Communication of rank {torch_rank(run.run_json, 0)}: {' '.join(said)}"


def recent_communication(reader: RunReader, run_json: Mapping[str, Any]) -> Figures:
    """Return the means of the newest readings and steps, and the link. Raises StoreError."""
    samples = _newest(reader, Stream.SAMPLES, READINGS)
    steps = _newest(reader, Stream.STEPS, STEPS)
    link = run_json.get("link")
    return Figures(
        bytes=_mean(samples, "comm/bytes", NEWEST),
        rate=_mean(samples, "comm/rate", NEWEST),
        time_s=_mean(samples, "comm/time", NEWEST),
        step_s=_mean(steps, "perf/step_time", STEPS),
        wait_s=_mean(steps, "perf/comm_wait", STEPS),
        bus_bandwidth=_mean(samples, "comm/bus_bandwidth", NEWEST),
        link=link_of(link) if isinstance(link, dict) else None,
    )


def _newest(reader: RunReader, stream: Stream, rows: int) -> Block:
    for info in reader.series():
        if info.stream == stream and info.source == "":
            return reader.read(info.id, max(0, info.rows - rows), info.rows, 1)
    return Block.from_rows([])


def _mean(block: Block, key: str, most: int) -> float | None:
    """Return the mean of the newest finite values, `most` at most; None without one."""
    if key not in block.keys:
        return None
    values = block.mean[block.keys.index(key)]
    values = values[np.isfinite(values)][-most:]
    return float(values.mean()) if len(values) else None
