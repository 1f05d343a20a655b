"""The safety margin of a prediction, learned from the measured peaks of earlier runs.

The prediction for a run is stored in `fit.json` in its folder.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from stepscope.common.files import atomic_write, read_regular_file
from stepscope.recorded_run import Run
from stepscope.run import RunError, RunStatus, read_only_reason, read_run, run_folders
from stepscope.store import StoreError
from trainer.config import ConfigError, RunConfig, Workload

log = logging.getLogger(__name__)

FIT_JSON = "fit.json"
METHOD = 1  # Version of the method; predictions by another method, torch or GPU are repeated.
MAX_FOLDERS = 200  # Newest runs whose run.json is read.
MAX_RUNS = 12
NEW_PREDICTIONS_S = 15.0  # Time after which no further run is predicted.
MAX_BYTES = 4096

DEFAULT_FACTOR = 1.10  # Memory of kernels, which is not predicted, is a few percent.
COVERED = 0.95  # Fraction of the runs that the margin covers.
MIN_RUNS = 3
ABOVE = 0.02  # Added to the measured ratio, since the next run differs.
MIN_RATIO, MAX_RATIO = 0.1, 10.0
"""Other ratios are those of other code, or of peaks that were reset."""

Capability = tuple[int, int] | None  # The compute capability of the predicted GPU, None for a CPU.


@dataclass(frozen=True, slots=True)
class SafetyMargin:
    """The factor of a prediction, and the number of earlier runs behind it."""

    factor: float
    runs: int
    source: str


DEFAULT = SafetyMargin(DEFAULT_FACTOR, 0, "default")


class _Stored(msgspec.Struct):
    method: int
    torch: str
    capability: tuple[int, int] | None
    predicted_peak_bytes: Annotated[int, msgspec.Meta(gt=0, lt=2**63 - 1)]


def learned(ratios: Sequence[float]) -> SafetyMargin:
    """Return the margin from ratios of measured to predicted peaks; of few runs the default.

    The ratio that 95% of the runs do not exceed, at least 1, plus 2%.
    """
    sane = sorted(ratio for ratio in ratios if MIN_RATIO <= ratio <= MAX_RATIO)
    if len(sane) < MIN_RUNS:
        return SafetyMargin(DEFAULT_FACTOR, len(sane), "default")
    covering = sane[math.ceil(COVERED * len(sane)) - 1]
    return SafetyMargin(max(1.0, covering) + ABOVE, len(sane), "learned")


def margin_for(
    config: RunConfig,
    root: Path,
    predict: Callable[[RunConfig], int],
    capability: Capability = None,
) -> SafetyMargin:
    """Return the margin learned from earlier runs of this workload on this kind of device.

    `capability` is that of the device of `predict`. Runs on a CPU record no peak of their tensors,
    so they have the default.
    """
    ratios: list[float] = []
    until = time.monotonic() + NEW_PREDICTIONS_S
    for folder, other in _earlier_runs(root, config):
        measured = _measured_peak(folder)
        if measured is None:
            continue
        predicted = _stored(folder, capability)
        if predicted is None and time.monotonic() < until:
            try:
                predicted = predict(other)
            except Exception as error:  # noqa: BLE001 - deleted data, settings that torch rejects
                log.info("no estimate of the earlier run %s: %s", folder.name, error)
                continue
            _store(folder, predicted, capability)
        if predicted:
            ratios.append(measured / predicted)
        if len(ratios) >= MAX_RUNS:
            break
    return learned(ratios)


def _earlier_runs(root: Path, config: RunConfig) -> Iterator[tuple[Path, RunConfig]]:
    """Yield folder and configuration of comparable ended runs, newest first."""
    if config.workload is Workload.CUSTOM:
        return  # the file may have changed
    for folder in islice(run_folders(root), MAX_FOLDERS):
        with contextlib.suppress(RunError, ConfigError, OSError):
            run = read_run(folder)
            settings = run.run_json.get("config")
            ended = run.status in (RunStatus.FINISHED, RunStatus.STOPPED)
            if not ended or not isinstance(settings, dict) or "workload" not in settings:
                continue
            found = RunConfig.from_dict(settings)
            same_kind = (found.device == "cpu") == (config.device == "cpu")
            if found.workload is config.workload and same_kind:
                yield folder, found


def _measured_peak(folder: Path) -> int | None:
    """Return the largest peak of torch's allocator; None if none was recorded."""
    with contextlib.suppress(RunError, StoreError, OSError):
        values = Run(folder).series("memory/peak_allocated").value
        values = values[np.isfinite(values)]
        if len(values) and values.max() > 0:
            return int(values.max())
    return None


def _store(folder: Path, predicted: int, capability: Capability) -> None:
    """Write a prediction into its run's folder, unless that is read-only or the disk is full."""
    content = _Stored(METHOD, version("torch"), capability, predicted)
    with contextlib.suppress(OSError, RunError):
        if read_only_reason(read_run(folder)) is None:
            atomic_write(folder / FIT_JSON, msgspec.json.encode(content).decode(), durable=False)


def _stored(folder: Path, capability: Capability) -> int | None:
    """Return a stored prediction that is valid for this torch and device."""
    try:
        found = msgspec.json.decode(read_regular_file(folder / FIT_JSON, MAX_BYTES), type=_Stored)
    except (OSError, ValueError, RecursionError):
        return None
    current = _Stored(METHOD, version("torch"), capability, found.predicted_peak_bytes)
    return found.predicted_peak_bytes if found == current else None
