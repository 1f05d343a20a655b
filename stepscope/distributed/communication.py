"""The cost of a run's collectives: their share of a step, and their share of the link's peak.

docs/distributed.md explains the figures and the sources of the formulas.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.bottleneck.step_window import READINGS
from stepscope.common.formatting import format_bytes, format_short_time, three_digits
from stepscope.distributed.stragglers.reader import in_job
from stepscope.metrics import Stream
from stepscope.run import RunInfo
from stepscope.run.rank_info import torch_rank
from stepscope.store import SeriesBlock, StoreError, StoreReader, store_name

LANE_BYTES_PER_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""Bytes/s of one PCIe lane each way by generation: transfers a second times the code's share of
data, PCI-SIG's base specifications (https://pcisig.com/faq). Packet headers take some more."""
FASTEST, MOST_LINKS = 1e15, 1024
"""Bytes/s of one link, and links of a GPU, that are not believed beyond."""
LITTLE_SHARE = 0.05  # Share of the time below which collectives are not worth a word of advice.
LOW_SHARE = 0.5
"""Share of the link below which large collectives mostly wait, or do not use the link."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The fastest way from a GPU to others of its machine: its name, and bytes/s each way."""

    name: str
    bytes_per_s: float


def link_of(facts: Mapping[str, Any]) -> Interconnect | None:
    """Return a GPU's link by its facts (`DeviceProperties` as a dict); None where it is not known.

    NVLink where links are up and their speed is known, else PCIe at its fastest: an idle GPU lowers
    it. That every GPU is reached over NVLink is assumed, not known.

    >>> link_of({"nvlinks": 18, "nvlink_speed": 25e9})
    Interconnect(name='18 NVLinks', bytes_per_s=450000000000.0)
    """
    if facts.get("nvlinks"):
        links, speed = _count(facts.get("nvlinks")), facts.get("nvlink_speed")
        if links is None or not isinstance(speed, int | float) or not 0 < speed < FASTEST:
            return None
        return Interconnect("1 NVLink" if links == 1 else f"{links} NVLinks", links * float(speed))
    generation, width = _count(facts.get("pcie_max_gen")), _count(facts.get("pcie_max_width"))
    lane = LANE_BYTES_PER_S.get(generation or 0)
    if lane is None or width is None:
        return None
    return Interconnect(f"PCIe {generation} with {width} lanes", lane * width)


def _count(value: Any) -> int | None:
    """Return a number of links or lanes; None for any other value: a file may be of others."""
    return value if type(value) is int and 0 < value <= MOST_LINKS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationFigures:
    """Means of a run's newest readings; seconds and bytes of a step, bytes/s; None is unknown.

    `time_s` is the time in collectives, `wait_s` how long backward() waited for averaged gradients
    after its own computing (`perf/comm_wait`).
    """

    bytes: float | None = None
    rate: float | None = None
    time_s: float | None = None
    step_s: float | None = None
    wait_s: float | None = None
    bus_bandwidth: float | None = None
    link: Interconnect | None = None


def sentences(figures: CommunicationFigures) -> list[str]:
    """Return a sentence for each figure that is known."""
    said = []
    if figures.bytes is not None:
        rate = "" if figures.rate is None else f", {format_bytes(figures.rate)} a second"
        said.append(f"Each step passes {format_bytes(figures.bytes)} to collectives{rate}.")
    time_s, step_s = figures.time_s, figures.step_s
    if time_s is not None and step_s:
        said.append(
            f"The device spends {format_short_time(time_s)} per step in them, "
            f"{_percent(time_s / step_s)} of its {format_short_time(step_s)}, "
            "including waiting for other ranks."
        )
        if time_s and figures.wait_s is not None and time_s / step_s >= LITTLE_SHARE:
            hidden = min(1.0, max(0.0, 1 - figures.wait_s / time_s))
            said.append(f"{_percent(hidden)} of that overlaps with the backward pass.")
    if figures.bus_bandwidth is not None:
        said.append(_bandwidth(figures.bus_bandwidth, figures.link))
    return said


def _bandwidth(bus: float, link: Interconnect | None) -> str:
    speed = f"Large collectives reach {rate_text(bus)} bus bandwidth"
    if link is None:
        return f"{speed}; the link's peak is unknown."
    share = bus / link.bytes_per_s
    most = f"{link.name} ({rate_text(link.bytes_per_s)})"
    why = " They wait for other ranks, or do not go over this link." if share < LOW_SHARE else ""
    return f"{speed}, {_percent(share)} of the peak of {most}.{why}"


def rate_text(bytes_per_s: float) -> str:
    """Return a bandwidth in GB/s of 1e9, as nccl-tests and data sheets give it, or in MB/s.

    >>> rate_text(450e9), rate_text(31.51e9), rate_text(1.234e9), rate_text(2.5e6)
    ('450 GB/s', '31.5 GB/s', '1.23 GB/s', '2.50 MB/s')
    """
    if 0 < bytes_per_s < 0.1e9:
        return f"{three_digits(bytes_per_s / 1e6)} MB/s"
    return f"{three_digits(bytes_per_s / 1e9)} GB/s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


log = logging.getLogger(__name__)

NEWEST = 8  # Readings whose mean counts, each of the steps of 1 to 64 s.
STEPS = 512  # Newest steps that are looked at: one or two frames of the store.


def communication_text(run: RunInfo) -> str | None:
    """Return the cost of the first rank's collectives; None for a process by itself, or unread."""
    if not in_job(run.run_json) or not (run.folder / store_name(0)).is_file():
        return None
    try:
        with StoreReader(run.folder, 0) as reader:
            said = sentences(recent_communication(reader, run.run_json))
    except StoreError as error:
        log.warning("%s: what collectives cost cannot be read: %s", run.id, error)
        return None
    if not said:
        return None
    return f"Communication of rank {torch_rank(run.run_json, 0)}: {' '.join(said)}"


def recent_communication(reader: StoreReader, run_json: Mapping[str, Any]) -> CommunicationFigures:
    """Return the means of the newest readings and steps, and the link. Raises StoreError."""
    samples = _newest(reader, Stream.SAMPLES, READINGS)
    steps = _newest(reader, Stream.STEPS, STEPS)
    link = run_json.get("link")
    return CommunicationFigures(
        bytes=_mean(samples, "comm/bytes", NEWEST),
        rate=_mean(samples, "comm/rate", NEWEST),
        time_s=_mean(samples, "comm/time", NEWEST),
        step_s=_mean(steps, "perf/step_time", STEPS),
        wait_s=_mean(steps, "perf/comm_wait", STEPS),
        bus_bandwidth=_mean(samples, "comm/bus_bandwidth", NEWEST),
        link=link_of(link) if isinstance(link, dict) else None,
    )


def _newest(reader: StoreReader, stream: Stream, rows: int) -> SeriesBlock:
    for info in reader.series():
        if info.stream == stream and info.source == "":
            return reader.read(info.id, max(0, info.rows - rows), info.rows, 1)
    return SeriesBlock.from_rows([])


def _mean(block: SeriesBlock, key: str, most: int) -> float | None:
    """Return the mean of the newest finite values, `most` at most; None without one."""
    if key not in block.keys:
        return None
    values = block.mean[block.keys.index(key)]
    values = values[np.isfinite(values)][-most:]
    return float(values.mean()) if len(values) else None
