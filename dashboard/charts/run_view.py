"""The parts of run.json that the run page is built from. No I/O.

`read_run` has checked its fields, but not the contents of lists and objects.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from stepscope.common.formatting import printable
from stepscope.common.json_values import dict_of
from stepscope.common.metrics import BY_KEY
from stepscope.run import RunInfo, RunKind, RunStatus

NO_ALLOCATOR = (
    "torch counts allocated and reserved memory on CUDA devices only, so process memory is shown."
)
NO_GPU = "no GPU was sampled in this run."
NOT_BEGUN = (
    "The training device is known after the first optimizer step; until then process memory is "
    "shown."
)
CPU_TRAINS = "this run trains on the CPU."

MAX_CUSTOM_CHARTS = 12  # charts of user-defined metrics; the others are recorded only
MAX_CUSTOM_CHARS = 100  # a longer metric name would dominate every poll
MAX_OPTIMIZERS = 8
NAME_LENGTH = 60
KINDS = {
    RunKind.TRAINER: "built-in",
    RunKind.WATCH: "watched",
    RunKind.INIT: "script",
}
MAX_GROUPS = 8  # parameter groups of an optimizer whose learning rate is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGpu:
    """A GPU that the run's sampler reads.

    `index`: in the run's list; `memory_bytes`: installed memory; `missing`: reasons by metric.
    """

    uuid: str
    name: str
    index: int = 0
    memory_bytes: int | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Inputs of the chart layout.

    `has_cuda`: the run trains on a CUDA device. `training_gpu`: its UUID. `used_gpus`: those of
    `gpus` for training, empty if unknown. `…_reason`: why values are missing.
    `optimizers`: class names in the order of their first steps. `custom`: metrics of this run that
    get a chart; `custom_left` counts the others. `samples_per_s`: of all ranks of an ended run.
    """

    has_cuda: bool
    gpus: tuple[SampledGpu, ...] = ()
    training_gpu: str | None = None
    used_gpus: frozenset[str] = frozenset()
    gpu_reason: str = NO_GPU
    allocator_reason: str | None = None
    kind: RunKind = RunKind.TRAINER
    optimizers: tuple[str, ...] = ()
    custom: tuple[str, ...] = ()
    custom_left: int = 0
    flops_reason: str | None = None
    peak_reason: str | None = None
    ranks: int = 1
    samples_per_s: float | None = None


def run_content(run: RunInfo) -> RunView:
    run_json, kind, device = run.run_json, run_kind(run), training_device(run)
    capabilities = run_json.get("capabilities") or {}
    on_cpu = device == "cpu"
    custom, left = custom_metrics(run_json)
    rate = dict_of(run_json.get("totals")).get("samples_per_s")
    return RunView(
        has_cuda=device not in ("cpu", None),
        gpus=() if on_cpu else tuple(_gpus(run_json.get("devices"), capabilities)),
        training_gpu=None if device in ("cpu", None) else device,
        gpu_reason=CPU_TRAINS
        if on_cpu and run_json.get("devices")
        else str(capabilities.get("nvml") or NO_GPU),
        allocator_reason=_allocator_reason(device, capabilities),
        kind=kind,
        optimizers=optimizer_names(run_json),
        custom=custom,
        custom_left=left,
        flops_reason=run_json.get("flops_reason"),
        peak_reason=run_json.get("peak_reason"),
        ranks=run.world_size,
        samples_per_s=float(rate) if isinstance(rate, int | float) else None,
    )


def has_simulated_gpus(run: RunInfo) -> bool:
    """Return True for a run on a machine whose GPUs the simulator provided."""
    return any(entry.get("simulated") is True for entry in run.run_json.get("devices") or ())


def run_kind(run: RunInfo) -> RunKind:
    """Return the kind of a run; an unknown kind is shown as a script."""
    try:
        return RunKind(run.run_json.get("kind", RunKind.TRAINER))
    except ValueError:
        return RunKind.INIT


def run_name(run: RunInfo) -> str:
    """Return the run's script with its ending, or the name that it was given."""
    name = str(run.run_json.get("name") or run.id)
    path = PurePath(str((run.run_json.get("script") or {}).get("path", "")))
    return printable(path.name if path.stem == name else name)[:NAME_LENGTH]


def training_device(run: RunInfo) -> str | None:
    """Return "cpu", a GPU's UUID, or None if the device is unknown or nothing is trained."""
    device = run.run_json.get("device")
    if device is None and run_kind(run) is RunKind.TRAINER:
        device = (run.run_json.get("config") or {}).get("device", "cpu")
    return None if device is None else str(device)


def custom_metrics(run_json: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the user-defined metrics that get a chart, and the number of the others."""
    listed = run_json.get("custom") or ()
    known = [key for key in listed if len(key) <= MAX_CUSTOM_CHARS and key not in BY_KEY]
    drawn = tuple(known[:MAX_CUSTOM_CHARTS])
    return drawn, sum(key not in BY_KEY for key in listed) - len(drawn)


def optimizer_names(run_json: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names of the script's optimizers, in the order of their first steps."""
    return tuple(name[:40] for name in (run_json.get("optimizers") or ())[:MAX_OPTIMIZERS])


def optimizer_keys(metric: str, optimizers: int) -> tuple[str, ...]:
    return (metric, *(f"{metric}.optimizer{i}" for i in range(1, optimizers)))


def rate_keys(optimizers: int) -> tuple[tuple[str, int, int], ...]:
    """Return the possible learning rate metrics, each with its optimizer and group."""
    groups = MAX_GROUPS if optimizers <= 2 else 2
    return tuple(
        ("train/lr" + (f".optimizer{i}" if i else "") + (f".group{j}" if j else ""), i, j)
        for i in range(max(1, optimizers))
        for j in range(groups)
    )


def _allocator_reason(device: str | None, capabilities: Mapping[str, Any]) -> str | None:
    if device is None:
        return NOT_BEGUN
    if device == "cpu":
        return NO_ALLOCATOR
    reason = capabilities.get("allocator")
    return None if reason is None else f"No allocated and reserved memory: {reason}."


def _gpus(devices: Any, capabilities: Mapping[str, Any]) -> list[SampledGpu]:
    entries = [entry for entry in devices or () if "uuid" in entry]
    missing = dict_of(capabilities.get("missing"))
    return [
        SampledGpu(
            uuid=str(entry["uuid"]),
            name=str(entry.get("name")),
            index=index,
            memory_bytes=memory if type(memory := entry.get("memory_total")) is int else None,
            missing=reasons_of(missing.get(str(entry["uuid"]))),
        )
        for index, entry in enumerate(entries)
    ]


def reasons_of(value: Any) -> dict[str, str]:
    """Return the texts of an object in run.json by key; empty for anything else."""
    return {key: text for key, text in dict_of(value).items() if isinstance(text, str)}


STALE_S = 3.0  # age of the heartbeat from which the page warns; it is written every second


def state(run: RunInfo) -> dict[str, Any]:
    """Return the state of a run: the part of an answer that needs no store."""
    run_json = run.run_json
    progress = {name: run_json.get(name) for name in ("step", "total_steps", "epoch", "epochs")}
    progress["epoch"] = progress["epoch"] or None  # counted from 1; 0: not counted
    return {
        "run": run.id,
        "status": run.status,
        "reason": run.reason or _waiting(run),
        "warnings": warnings(run),
        "now": round((run.ended or time.time()) - run.created, 3),
        "progress": progress,
        "series": {},
        "events": [],
    }


def warnings(run: RunInfo) -> list[str]:
    """Return the warnings about the recording itself, one sentence each."""
    run_json, age_s = run.run_json, run.heartbeat_age_s
    found = [str(run_json["problem"])] if run_json.get("problem") else []
    dropped = run_json.get("dropped") or 0
    if dropped > 0:
        were = "step or event was" if dropped == 1 else "steps or events were"
        why = run_json.get("dropped_reason") or (
            "the disk was too slow and the memory buffer is full, or the store cannot hold them"
        )
        found.append(f"{dropped:,} {were} not recorded: {why}. Training was not delayed.")
    if run.status.live and age_s > STALE_S:
        found.append(
            f"No update for {age_s:,.0f} s. The run has not ended, but its folder does not "
            "change: the disk may be full or read-only, or the process blocked. Values may be "
            "stale."
        )
    return found


def _waiting(run: RunInfo) -> str | None:
    if run.status is RunStatus.PENDING and run_kind(run) in (RunKind.WATCH, RunKind.INIT):
        return "The script has not finished its first optimizer step yet."
    return None
