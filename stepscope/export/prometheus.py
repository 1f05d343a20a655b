"""Prometheus metrics of this machine's GPUs and of the live runs, as `stepscope exporter` serves.

Values are in base units; the name ends in the unit, a `_ratio` of 1 is 100%. A missing value has no
series, and the series of a run disappear with its end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import numpy as np
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from stepscope import __version__
from stepscope.common.files import modified_ns
from stepscope.common.metrics import BY_KEY, Unit
from stepscope.gpu.health import (
    HW_THERMAL,
    POWER_BRAKE,
    POWER_CAP,
    SLOWDOWN,
    SW_THERMAL,
)
from stepscope.gpu.machine_monitor import MachineMonitor
from stepscope.gpu.machine_state import DeviceState, MachineState
from stepscope.gpu.source import WITHOUT_GPU
from stepscope.run import RUN_JSON, RunError, RunStatus, run_folders
from stepscope.run.rank_info import RankInfo, readable_ranks
from stepscope.run_setup import training_gpu
from stepscope.store import StoreError, StoreReader
from stepscope.store.blocks import missing
from stepscope.store.final_values import read_newest, reduced

log = logging.getLogger(__name__)

SILENT_S = 300.0
"""Time in which a process without a heartbeat keeps its last one, for an alert."""
VALUE_AGE_S = 60.0
AGE_STEPS = 3
"""Age from which values of the sampler are missing; those of step speed if also AGE_STEPS steps."""
DRIVER_TIMEOUT_S = 3.0
LABEL_LENGTH = 200
_THROTTLES = {
    "power_cap": POWER_CAP,
    "hardware_slowdown": SLOWDOWN,
    "thermal_software": SW_THERMAL,
    "thermal_hardware": HW_THERMAL,
    "power_brake": POWER_BRAKE,
}
SCALES = {Unit.PERCENT: 0.01, Unit.MEGAHERTZ: 1e6, Unit.TERAFLOPS: 1e12}
"""Factors from stored to base units: ratio, hertz, FLOP/s. All others are stored in base units."""
HELP = {
    "gpu_throttle_seconds_total": "Time since driver load in which a reason lowered the clocks.",
    "gpu_ecc_errors_total": "Memory errors since driver load that ECC has found.",
    "gpu_fan_speed_ratio": "Requested fan speed, as a share of its maximum; may exceed 1.",
    "gpu_memory_reserved_bytes": "Device memory that the driver keeps, not part of that in use.",
    "gpu_pcie_transmit_bytes_per_second": "From the GPU over PCIe, mean since the last reading.",
    "gpu_pcie_receive_bytes_per_second": "To the GPU over PCIe, mean since the last reading.",
    "run_mfu_ratio": "Model FLOP/s as a share of the GPU's dense peak for the run's precision.",
    "run_process_cpu_ratio": "CPU time per wall time, without workers; 1 is one core.",
}
"""Where several metrics have one name, and where the stored metric has another unit."""


GPU_METRICS = {
    "gpu/util": "gpu_utilization_ratio",
    "gpu/mem_util": "gpu_memory_utilization_ratio",
    "gpu/mem_used": "gpu_memory_used_bytes",
    "gpu/mem_reserved": "gpu_memory_reserved_bytes",
    "gpu/mem_total": "gpu_memory_total_bytes",
    "gpu/temp": "gpu_temperature_celsius",
    "gpu/temp_mem": "gpu_memory_temperature_celsius",
    "gpu/temp_margin": "gpu_temperature_margin_celsius",
    "gpu/fan": "gpu_fan_speed_ratio",
    "gpu/power": "gpu_power_watts",
    "gpu/power_limit": "gpu_power_limit_watts",
    "gpu/energy": "gpu_energy_joules_total",
    "gpu/sm_clock": "gpu_sm_clock_hertz",
    "gpu/mem_clock": "gpu_memory_clock_hertz",
    "gpu/throttle_power": "gpu_throttle_seconds_total",
    "gpu/throttle_sw_thermal": "gpu_throttle_seconds_total",
    "gpu/throttle_hw_thermal": "gpu_throttle_seconds_total",
    "gpu/throttle_brake": "gpu_throttle_seconds_total",
    "gpu/pcie_tx": "gpu_pcie_transmit_bytes_per_second",
    "gpu/pcie_rx": "gpu_pcie_receive_bytes_per_second",
    "gpu/nvlink_tx": "gpu_nvlink_transmit_bytes_per_second",
    "gpu/nvlink_rx": "gpu_nvlink_receive_bytes_per_second",
    "gpu/ecc_corrected": "gpu_ecc_errors_total",
    "gpu/ecc_uncorrected": "gpu_ecc_errors_total",
    "gpu/remapped_rows": "gpu_remapped_rows",
    "gpu/pcie_replays": "gpu_pcie_replays_total",
}
"""Prometheus names, without the prefix `stepscope_`, by metric."""
RUN_METRICS = {
    "train/loss": "run_loss",
    "train/epoch": "run_epoch",
    "train/lr": "run_learning_rate",
    "train/grad_norm": "run_gradient_norm",
    "val/loss": "run_validation_loss",
    "val/accuracy": "run_validation_accuracy_ratio",
    "perf/step_time": "run_step_time_seconds",
    "perf/data_wait": "run_data_wait_seconds",
    "perf/samples_per_sec": "run_samples_per_second",
    "perf/tokens_per_sec": "run_tokens_per_second",
    "perf/tflops": "run_model_flops_per_second",
    "perf/mfu": "run_mfu_ratio",
    "memory/allocated": "run_memory_allocated_bytes",
    "memory/reserved": "run_memory_reserved_bytes",
    "memory/peak_allocated": "run_memory_peak_allocated_bytes",
    "memory/alloc_retries": "run_allocation_retries_total",
    "memory/ooms": "run_out_of_memory_errors_total",
    "process/rss": "run_process_resident_bytes",
    "process/children_rss": "run_workers_private_bytes",
    "process/cpu": "run_process_cpu_ratio",
}
LABELS = {
    "gpu/throttle_power": {"reason": "power_cap"},
    "gpu/throttle_sw_thermal": {"reason": "thermal_software"},
    "gpu/throttle_hw_thermal": {"reason": "thermal_hardware"},
    "gpu/throttle_brake": {"reason": "power_brake"},
    "gpu/ecc_corrected": {"type": "corrected"},
    "gpu/ecc_uncorrected": {"type": "uncorrected"},
}
"""Labels of metrics that have one name."""
_RUN_JSON = {
    "step": ("run_steps_total", "Last optimizer step."),
    "total_steps": ("run_planned_steps", "Number of steps that the run will have."),
}


class _Families:
    """Samples by metric name."""

    def __init__(self) -> None:
        self.found: dict[str, Metric] = {}

    def add(self, name: str, text: str, value: float, labels: Mapping[str, Any]) -> None:
        name = f"stepscope_{name}"
        family = self.found.get(name)
        if family is None:
            kind = "gauge"
            if name.endswith("_total"):
                kind = "counter"
            elif name.endswith("_info"):
                kind = "info"
            base = name.removesuffix("_total").removesuffix("_info")
            family = self.found[name] = Metric(base, text, kind)
        # Prometheus omits a label without text.
        texts = {k: "" if text is None else str(text)[:LABEL_LENGTH] for k, text in labels.items()}
        family.add_sample(name, texts, value)

    def add_all(
        self, names: Mapping[str, str], values: Mapping[str, float], labels: dict[str, str]
    ) -> None:
        """Add the values of the metrics in `names`, in base units."""
        for key, name in names.items():
            if key in values:
                value = values[key] * SCALES.get(BY_KEY[key].unit, 1.0)
                text = HELP.get(name, BY_KEY[key].meaning)
                self.add(name, text, value, labels | LABELS.get(key, {}))


def _newest_values(folder: Path, number: int, now: float) -> dict[str, float]:
    """Return the newest value of each exported metric of a process. Raises StoreError.

    A metric that the newest rows lack, such as a validation's, has the mean of its last bucket.
    """
    found: dict[str, tuple[float, float]] = {}  # time and value
    with StoreReader(folder, number) as reader:
        for series in reader.series():
            for block in (reduced(reader, series), read_newest(reader, series)):
                for row, key in enumerate(block.keys):
                    given = np.flatnonzero(~missing(block.mean[row]))
                    if key in RUN_METRICS and BY_KEY[key].stream == series.stream and len(given):
                        last = given[-1]
                        found[key] = float(block.ts[last]), float(block.mean[row, last])
    _, step_s = found.get("perf/step_time", (0.0, 0.0))
    speed = max(VALUE_AGE_S, AGE_STEPS * step_s)
    ages = {"train": math.inf, "val": math.inf, "perf": speed}
    return {
        key: value
        for key, (ts, value) in found.items()
        if ts >= now - ages.get(key.partition("/")[0], VALUE_AGE_S)
    }


class _MachinePoll:
    """Reads the GPUs in a separate thread, because a broken GPU can block a driver call."""

    def __init__(self, machine: MachineMonitor) -> None:
        self._machine = machine
        self._thread: threading.Thread | None = None
        self._state: MachineState | None = None

    def state(self) -> MachineState | None:
        """Return the present state; None if the driver does not answer or reading failed."""
        if self._thread is None or not self._thread.is_alive():
            self._state = None
            name = "stepscope-exporter"  # the thread ends with this reading
            self._thread = threading.Thread(target=self._poll, name=name, daemon=True)
            self._thread.start()
        self._thread.join(DRIVER_TIMEOUT_S)
        return self._state

    def _poll(self) -> None:
        try:
            self._state = self._machine.poll()
        except Exception:  # shown as stepscope_up 0; the next reading may succeed
            log.warning("stepscope exporter: the GPUs could not be read", exc_info=True)


class ExporterCollector:
    """Custom collector of prometheus-client. Thread-safe."""

    def __init__(self, root: Path, machine: MachineMonitor) -> None:
        self._root = root
        self._poll = _MachinePoll(machine)
        self._lock = threading.Lock()

    def collect(self) -> list[Metric]:
        """Return all metrics."""
        families = _Families()
        build = {"version": __version__, "python": platform.python_version()}
        families.add("build_info", "Version of the exporter.", 1, build)
        with self._lock:
            self._add_gpus(families)
        self._add_runs(families)
        return list(families.found.values())

    def _add_gpus(self, families: _Families) -> None:
        state = self._poll.state()
        if state is None or state.reason not in WITHOUT_GPU:
            _add_up(families, "gpus", state is not None and state.reason is None)
        for device in () if state is None else state.devices:
            for one in (device, *device.instances):
                _add_gpu(families, one)

    def _add_runs(self, families: _Families) -> None:
        _add_up(families, "runs", os.access(self._root, os.R_OK | os.X_OK))
        folders: list[Path] = []
        with contextlib.suppress(RunError):  # `up` of the reader is 0
            folders = list(run_folders(self._root))
        for folder in folders:
            # Each heartbeat replaces a file of the folder, or on a full disk touches it.
            changed_ns = max(modified_ns(folder), modified_ns(folder / RUN_JSON))
            if time.time() - changed_ns / 1e9 > SILENT_S:
                continue
            ranks = {rank.rank: rank for rank in readable_ranks(folder) if _is_shown(rank)}
            for _, rank in sorted(ranks.items()):
                labels = _add_rank(families, folder, rank)
                if rank.status.live:
                    with contextlib.suppress(StoreError):
                        values = _newest_values(folder, rank.number, time.time())
                        families.add_all(RUN_METRICS, values, labels)


def _add_up(families: _Families, reader: str, up: bool) -> None:
    text = "1 if the last reading succeeded, of the GPUs or of the runs folder; else 0."
    families.add("up", text, float(up), {"reader": reader})


def _add_gpu(families: _Families, device: DeviceState) -> None:
    info, labels = device.info, {"uuid": device.info.uuid}
    about = {"index": info.nvml_index, "name": info.name, "driver": info.driver_version}
    families.add("gpu_info", "A GPU or MIG instance.", 1, labels | about)
    families.add("gpu_up", "0 if the driver has lost the GPU.", device.lost is None, labels)
    families.add_all(GPU_METRICS, device.values, labels)
    slowdown = None if device.facts is None else device.facts.temp_slowdown
    if slowdown is not None:
        text = "Temperature from which the GPU slows itself down."
        families.add("gpu_temperature_slowdown_celsius", text, slowdown, labels)
    mask = device.values.get("gpu/throttle_reasons")
    if mask is not None:
        text = "1 if the clocks are lowered now for this reason, else 0."
        for reason, bit in _THROTTLES.items():
            families.add("gpu_throttled", text, bool(int(mask) & bit), labels | {"reason": reason})


def _is_shown(rank: RankInfo) -> bool:
    is_open = rank.status.live or rank.status is RunStatus.CRASHED
    return is_open and rank.age_s < SILENT_S


def _add_rank(families: _Families, folder: Path, rank: RankInfo) -> dict[str, str]:
    """Add what run.json has; return the labels of this process."""
    content, labels = rank.run_json, {"run": folder.name, "rank": str(rank.rank)}
    slurm = content.get("slurm") or {}
    about = {name: content.get(name) for name in ("name", "kind", "host")} | {
        "uuid": training_gpu(content),
        **{f"slurm_{name}": slurm.get(name) for name in ("job_id", "array_task_id")},
    }
    text = "A process of a live run; uuid is that of the GPU that it trains on."
    if rank.status.live:
        families.add("run_info", text, 1, labels | about)
    text = "Last heartbeat of the process, in seconds since the epoch."
    families.add("run_heartbeat_timestamp_seconds", text, rank.beat, labels)
    for key, (name, text) in _RUN_JSON.items():
        value = content.get(key) if rank.status.live else None
        if value is not None and value >= 0:
            families.add(name, text, value, labels)
    return labels


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # for a client that sends nothing

    def handle(self) -> None:
        """Answer the request of a client, which may be silent or gone."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def open_server(collector: ExporterCollector, address: str, port: int) -> WSGIServer:
    """Return a bound server of the metrics; port 0 is a free one. Raises OSError."""
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    server = type("_Server", (ThreadingWSGIServer,), {"address_family": family})
    registry = CollectorRegistry(auto_describe=False)
    registry.register(cast(Any, collector))
    serve = make_wsgi_app(registry)
    local = ipaddress.ip_address(place[0]).is_loopback

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host = re.sub(r":\d*$", "", environ.get("HTTP_HOST", "")).lower()
        if local and host not in _LOCAL | {address}:  # DNS rebinding
            start("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"Host: must be localhost or the address.\n"]
        return cast(Iterable[bytes], serve(environ, start))

    return cast(WSGIServer, make_server(str(place[0]), port, application, server, _Handler))


_LOCAL = {"localhost", "127.0.0.1", "[::1]"}
