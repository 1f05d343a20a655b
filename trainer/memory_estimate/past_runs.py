"""What earlier runs of a workload took and how fast they were, from their folders.

The prediction for a run is kept beside it, in `fit.json`, so that it is made once.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.common.files import atomic_write, read_regular_file
from stepscope.recorded_run import Run
from stepscope.run import (
    RunError,
    RunInfo,
    RunStatus,
    read_only_reason,
    read_run,
    run_folders,
)
from stepscope.store import StoreError
from trainer.config import ConfigError, RunConfig, Workload
from trainer.memory_estimate.safety_margin import Margin, learned

FIT_JSON = "fit.json"
METHOD = 1
"""Of predicting; a file of another method, or made with another torch, is made anew."""
LOOKED_AT = 200
"""Newest runs whose run.json is read."""
LEARNED_FROM = 12
NEW_PREDICTIONS_S = 15.0
"""Seconds after which no further run is predicted at this time."""
SAME = frozenset(
    ("seed", "epochs", "max_steps", "learning_rate", "schedule", "resume", "runner", "nan_policy")
    + ("lr_warmup_steps", "batch_size", "warmup", "memory_warmup")
)
"""Fields that may differ between runs whose throughput is compared by batch size."""
FIRST_STEPS, LEAST_STEPS = 10, 20
"""Steps that are left out of a run's throughput, and those that it must have."""

KEPT_LIMIT = 4096
"""Bytes of a kept prediction."""

Predict = Callable[[RunConfig], int]
Capability = tuple[int, int] | None
"""The compute capability of the GPU for which was predicted, None for a CPU."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A run that ended, and how it was configured."""

    folder: Path
    config: RunConfig


def earlier_runs(root: Path, config: RunConfig) -> Iterator[Earlier]:
    """Yield ended runs of this workload on this kind of device, newest first."""
    if config.workload is Workload.USER:
        return  # the file may be another one now
    for folder in islice(run_folders(root), LOOKED_AT):
        found = _run(folder)
        if found is None:
            continue
        same_kind = (found.config.device == "cpu") == (config.device == "cpu")
        if found.config.workload is config.workload and same_kind:
            yield found


def margin_for(
    config: RunConfig, root: Path, predict: Predict, capability: Capability = None
) -> Margin:
    """Return the margin learned from measured against predicted peaks of earlier runs.

    `capability` is that of the device for which `predict` predicts. Runs on a CPU measure no
    peak of their tensors, so there it is the default.
    """
    ratios: list[float] = []
    until = time.monotonic() + NEW_PREDICTIONS_S
    for run in earlier_runs(root, config):
        measured = measured_peak(run.folder)
        if measured is None:
            continue
        predicted = _kept(run.folder, capability)
        if predicted is None and time.monotonic() < until:
            predicted = _predicted(run, predict, capability)
        if predicted:
            ratios.append(measured / predicted)
        if len(ratios) >= LEARNED_FROM:
            break
    return learned(ratios)


def measured_peak(folder: Path) -> int | None:
    """Return the most bytes that torch's allocator gave the run; None where none was recorded."""
    with contextlib.suppress(RunError, StoreError, OSError):
        values = Run(folder).series("memory/peak_allocated").value
        values = values[np.isfinite(values)]
        if len(values) and values.max() > 0:
            return int(values.max())
    return None


def throughputs(root: Path, config: RunConfig) -> dict[int, float]:
    """Return samples per second by batch size, of runs that otherwise had this configuration.

    Of several runs of a size the newest counts.
    """
    found: dict[int, float] = {}
    wanted = _compared(config)
    for run in earlier_runs(root, config):
        size = run.config.batch_size
        if size in found or _compared(run.config) != wanted:
            continue
        rate = measured_rate(run.folder)
        if rate is not None:
            found[size] = rate
    return found


def measured_rate(folder: Path) -> float | None:
    """Return the median samples per second after the first steps; None of too short a run."""
    with contextlib.suppress(RunError, StoreError, OSError):
        rates = Run(folder).series("perf/samples_per_sec").value[FIRST_STEPS:]
        rates = rates[np.isfinite(rates) & (rates > 0)]
        if len(rates) >= LEAST_STEPS:
            return float(np.median(rates))
    return None


def keep(folder: Path, predicted: int, capability: Capability = None) -> None:
    """Write a prediction beside its run; a folder of others, or a full disk, goes without."""
    content = {**_made_with(capability), "predicted_peak_bytes": predicted}
    with contextlib.suppress(OSError, RunError):
        if read_only_reason(read_run(folder)) is not None:
            return
        atomic_write(folder / FIT_JSON, json.dumps(content), durable=False)


def _predicted(run: Earlier, predict: Predict, capability: Capability) -> int | None:
    try:
        found = predict(run.config)
    except Exception:  # noqa: BLE001 - data that are gone, settings that torch now refuses
        return None
    keep(run.folder, found, capability)
    return found


def _made_with(capability: Capability) -> dict[str, Any]:
    """What a kept prediction must have been made with to be used."""
    return {
        "method": METHOD,
        "torch": version("torch"),
        "capability": None if capability is None else list(capability),
    }


def _kept(folder: Path, capability: Capability) -> int | None:
    """Return a prediction that was kept; the file is not trusted."""
    try:
        content: Any = json.loads(read_regular_file(folder / FIT_JSON, KEPT_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    if any(content.get(name) != value for name, value in _made_with(capability).items()):
        return None
    found = content.get("predicted_peak_bytes")
    if type(found) is not int or found <= 0:
        return None
    return found if math.log2(found) < 63 else None


def _run(folder: Path) -> Earlier | None:
    try:
        run: RunInfo = read_run(folder)
        config = run.run_json.get("config")
        if run.status not in (RunStatus.FINISHED, RunStatus.STOPPED) or not isinstance(
            config, dict
        ):
            return None
        return Earlier(folder, RunConfig.from_dict(config)) if "workload" in config else None
    except (RunError, ConfigError, OSError):
        return None


def _compared(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in SAME}
