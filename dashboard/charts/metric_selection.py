"""Which metrics of a run its page is sent: what it draws, and of what it shows the newest value."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dashboard.charts.run_view import (
    custom_metrics,
    loss_keys,
    norm_keys,
    optimizer_names,
    rate_keys,
    run_kind,
)
from stepscope.metrics import METRICS
from stepscope.run import RunInfo, RunKind

FOLDED = {
    "train/amp_scale",
    "train/amp_skipped",
    "perf/tokens_per_sec",
    "perf/tflops",
    "perf/mfu",
    "gpu/temp",
    "gpu/power_limit",
    "comm/bytes",
    "comm/rate",
    "comm/time",
    "comm/share",
    "comm/bus_bandwidth",
}
"""In folded charts only, as are learning rates and gradient norms: sent while they are open."""
NOT_DRAWN = {
    "perf/forward",
    "perf/backward",
    "perf/optimizer",
    "perf/backward_compute",
    "perf/comm_wait",
    "perf/ddp_iteration",
    "perf/ddp_models",
    "train/lr",
    "train/grad_norm",
    "train/backwards",
    "train/epoch",
    "memory/active",
    "memory/inactive_split",
    "memory/alloc_retries",
    "memory/ooms",
    "memory/peak_reserved",
    "memory/parameters",
    "memory/gradients",
    "memory/optimizer_state",
    "memory/process_used",
    "process/children_rss",
    "gpu/energy",
    "gpu/mem_clock",
    "gpu/sm_clock",
    "gpu/throttle_reasons",
    "gpu/mem_reserved",
    "gpu/mem_others",
    "gpu/temp_mem",
    "gpu/temp_margin",
    "gpu/throttle_power",
    "gpu/throttle_sw_thermal",
    "gpu/throttle_hw_thermal",
    "gpu/throttle_brake",
    "gpu/fan",
    "gpu/pcie_tx",
    "gpu/pcie_rx",
    "gpu/nvlink_tx",
    "gpu/nvlink_rx",
    "gpu/sm_active",
    "gpu/sm_occupancy",
    "gpu/tensor_active",
    "gpu/dram_active",
    "gpu/ecc_corrected",
    "gpu/ecc_uncorrected",
    "gpu/remapped_rows",
    "gpu/remap_pending",
    "gpu/remap_failed",
    "gpu/pcie_replays",
}
"""Recorded, but in no chart of this page: not worth their bytes twice a second."""
LIVE_KEYS = {metric.key for metric in METRICS} - NOT_DRAWN - FOLDED


@dataclass(frozen=True, slots=True)
class Keys:
    """The metrics that a client is sent: those it draws, and those of which it shows the newest."""

    drawn: frozenset[str]
    last: frozenset[str]


def keys_of(run: RunInfo, include_folded: bool) -> Keys:
    """Return the metrics to send of a run; those of its folded charts only where asked for."""
    include_folded |= run_kind(run) is RunKind.RECORD  # which folds nothing
    optimizers = len(optimizer_names(run.run_json))
    return _keys(custom_metrics(run.run_json)[0], optimizers, include_folded)


@functools.lru_cache(maxsize=64)
def _keys(custom: tuple[str, ...], optimizers: int, include_folded: bool) -> Keys:
    rates = (key for key, _, _ in rate_keys(optimizers))
    folded = {*FOLDED, *norm_keys(optimizers), *rates}
    drawn = {*LIVE_KEYS, *custom, *loss_keys(optimizers), *(folded if include_folded else ())}
    return Keys(frozenset(drawn), frozenset({*drawn, *folded, "train/epoch"}))
