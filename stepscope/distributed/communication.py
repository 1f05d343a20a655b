"""Cost of a run's collectives: fraction of a step, and utilization of the interconnect.

docs/distributed.md explains the figures and the sources of the formulas.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.bottleneck.classify import percent
from stepscope.bottleneck.step_window import READINGS
from stepscope.common.formatting import format_bytes, format_short_time, three_digits
from stepscope.distributed.stragglers.reader import in_job
from stepscope.metrics import Stream
from stepscope.run import RunInfo
from stepscope.run.rank_info import torch_rank
from stepscope.store import StoreError, StoreReader, store_name

log = logging.getLogger(__name__)

LANE_BYTES_PER_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""Bytes/s of one PCIe lane each way by generation: transfers per second times the fraction of data
in the line code, PCI-SIG's base specifications (https://pcisig.com/faq), with packet headers."""
MAX_LINK_BYTES_PER_S, MAX_LINKS = 1e15, 1024  # Higher values in a run's file are invalid.
MIN_OVERLAP_FRACTION = 0.05  # Fraction of a step from which the overlap of collectives is shown.
LOW_UTILIZATION = 0.5
"""Below it large collectives mostly wait, or do not use the interconnect."""
NEWEST = 8  # Number of readings averaged, each over the steps of 1 to 64 s.
STEPS = 512  # Number of newest steps averaged: one or two frames of the store.


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The fastest connection of a GPU to others of its host, and its bytes/s each way."""

    name: str
    bytes_per_s: float


def link_of(facts: Mapping[str, Any]) -> Interconnect | None:
    """Return a GPU's interconnect by its DeviceProperties as a dict; None if unknown.

    NVLink if links are up and their speed is known, else PCIe at its maximum: an idle GPU lowers
    it. Assumes that every GPU is connected by NVLink.

    >>> link_of({"nvlinks": 18, "nvlink_speed": 25e9})
    Interconnect(name='18 NVLinks', bytes_per_s=450000000000.0)
    """
    if facts.get("nvlinks"):
        links, speed = _count(facts.get("nvlinks")), facts.get("nvlink_speed")
        if links is None or not isinstance(speed, int | float):
            return None
        name = "1 NVLink" if links == 1 else f"{links} NVLinks"
        return Interconnect(name, links * speed) if 0 < speed < MAX_LINK_BYTES_PER_S else None
    generation, width = _count(facts.get("pcie_max_gen")), _count(facts.get("pcie_max_width"))
    lane = LANE_BYTES_PER_S.get(generation or 0)
    if lane is None or width is None:
        return None
    return Interconnect(f"PCIe {generation} with {width} lanes", lane * width)


def _count(value: Any) -> int | None:
    """Return an untrusted number of links or lanes; None if invalid."""
    return value if type(value) is int and 0 < value <= MAX_LINKS else None


def sentences(means: Mapping[str, float], link: Interconnect | None = None) -> list[str]:
    """Return a sentence for each known figure, by the means of metrics."""
    texts = []
    if "comm/bytes" in means:
        rate = f", {format_bytes(means['comm/rate'])} a second" if "comm/rate" in means else ""
        texts.append(f"Each step passes {format_bytes(means['comm/bytes'])} to collectives{rate}.")
    time_s, step_s = means.get("comm/time"), means.get("perf/step_time")
    if time_s is not None and step_s:
        texts.append(
            f"The device spends {format_short_time(time_s)} per step in them, "
            f"{percent(time_s / step_s)} of its {format_short_time(step_s)}, "
            "including waiting for other ranks."
        )
        wait_s = means.get("perf/comm_wait")  # the exposed part
        if time_s and wait_s is not None and time_s / step_s >= MIN_OVERLAP_FRACTION:
            hidden = min(1.0, max(0.0, 1 - wait_s / time_s))
            texts.append(f"{percent(hidden)} of that overlaps with the backward pass.")
    if (bandwidth := means.get("comm/bus_bandwidth")) is not None:
        text = f"Large collectives reach {rate_text(bandwidth)} bus bandwidth"
        if link is None:
            text += "; the link's peak is unknown."
        else:
            used = bandwidth / link.bytes_per_s
            text += f", {percent(used)} of the peak of {link.name} ({rate_text(link.bytes_per_s)})."
            if used < LOW_UTILIZATION:
                text += " They wait for other ranks, or do not go over this link."
        texts.append(text)
    return texts


def rate_text(bytes_per_s: float) -> str:
    """Return a bandwidth in GB/s of 1e9, as in nccl-tests and data sheets, or in MB/s.

    >>> rate_text(450e9), rate_text(31.51e9), rate_text(1.234e9), rate_text(2.5e6)
    ('450 GB/s', '31.5 GB/s', '1.23 GB/s', '2.50 MB/s')
    """
    if 0 < bytes_per_s < 0.1e9:
        return f"{three_digits(bytes_per_s / 1e6)} MB/s"
    return f"{three_digits(bytes_per_s / 1e9)} GB/s"


def communication_text(run: RunInfo) -> str | None:
    """Return the cost of folder rank 0's collectives; None if unknown, or for a single process."""
    if not in_job(run.run_json) or not (run.folder / store_name(0)).is_file():
        return None
    try:
        with StoreReader(run.folder, 0) as reader:
            means = _means(reader, Stream.SAMPLES, READINGS, NEWEST)
            means |= _means(reader, Stream.STEPS, STEPS, STEPS)
    except StoreError as error:
        log.warning("%s: the cost of collectives cannot be read: %s", run.id, error)
        return None
    link = run.run_json.get("link")
    texts = sentences(means, link_of(link) if isinstance(link, dict) else None)
    return (
        f"Communication of rank {torch_rank(run.run_json, 0)}: {' '.join(texts)}" if texts else None
    )


def _means(reader: StoreReader, stream: Stream, rows: int, most: int) -> dict[str, float]:
    """Return the mean of the newest `most` finite values of each metric in the newest rows."""
    means = {}
    info = next((s for s in reader.series() if s.stream == stream and s.source == ""), None)
    if info is not None:
        block = reader.read(info.id, max(0, info.rows - rows), info.rows, 1)
        for key, values in zip(block.keys, block.mean, strict=True):
            finite = values[np.isfinite(values)][-most:]
            if len(finite):
                means[key] = float(finite.mean())
    return means
