"""The figures of one recorded run, from a few reduced reads of its store, however long the run.

Those of a job are rank 0's; its samples/s are those of rank 0 times the number of ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from stepscope.common.files import read_tail
from stepscope.common.formatting import terminal_text
from stepscope.common.metrics import BY_KEY, Stream
from stepscope.memory.breakdown_series import breakdown_source, read_breakdown
from stepscope.run import RunInfo, read_metadata
from stepscope.run.info import CODE_DIFF, MAX_DIFF_BYTES, RunMetadata
from stepscope.run_setup import training_gpu
from stepscope.store import StoreError, StoreReader, final_values
from stepscope.store.blocks import LOSS, STEP_TIME, Floats
from stepscope.store.final_values import reduced, typical

MAX_MEMORY_READINGS = 128  # of which the one with the most memory is compared
MAX_METRICS = 50  # of the script's own metrics
PHASES = (
    "perf/data_wait",
    "perf/h2d",
    "perf/forward",
    "perf/backward",
    "perf/optimizer",
    "perf/gpu_time",
    "perf/gpu_wait",
    "perf/comm_wait",
)
"""Parts of a step that are shown side by side; they may overlap."""
_FOREIGN = frozenset(("free", "driver", "others", "elsewhere"))
"""Categories of memory that this process does not hold."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run and its figures in SI units and bytes; a figure that was not recorded is absent.

    `values` has the figures of `stepscope.compare.comparison.FIGURES`, and `final KEY` and `best
    KEY` of each metric of the training. `phases` are seconds per step, `memory` bytes by category
    when this process used most. `code_diff`: uncommitted changes, as git has them. `not_finite`:
    metrics whose last value is NaN or infinite. `problem`: why the store has no figures.
    """

    run: RunInfo
    metadata: RunMetadata
    values: Mapping[str, float]
    phases: Mapping[str, float]
    memory: Mapping[str, int]
    code_diff: str | None = None
    samples_per_step: float | None = None  # of all ranks
    not_finite: tuple[str, ...] = ()
    problem: str | None = None


def read_figures(run: RunInfo) -> RunFigures:
    """Return the figures of a run; those of run.json only, with the problem, without a store."""
    metadata, diff = read_metadata(run), None
    if metadata.git is not None and metadata.git.diff:
        with contextlib.suppress(OSError):
            diff = terminal_text(read_tail(run.folder / CODE_DIFF, MAX_DIFF_BYTES))
    ended, step = time.time() if run.status.live else run.ended, run.run_json.get("step")
    values = {} if ended is None else {"duration": max(0.0, ended - run.created)}
    values |= {"steps": float(step)} if type(step) is int else {}
    of_metadata = RunFigures(run, metadata, values, {}, {}, diff)
    try:
        with StoreReader(run.folder) as reader:
            return _read(reader, of_metadata)
    except StoreError as error:
        return replace(of_metadata, problem=str(error))


def read_lines(run: RunInfo) -> dict[str, tuple[Floats, Floats, Floats]]:
    """Return steps, seconds since the start and values of each metric, reduced.

    Metrics of `gpu/` are those of the training GPU. Raises StoreError.
    """
    found = {}
    with StoreReader(run.folder) as reader:
        for info in reader.series():
            if info.source not in ("", training_gpu(run.run_json)):
                continue
            block = reduced(reader, info)
            for row, key in enumerate(block.keys):
                if len(at := np.flatnonzero(block.count[row])):
                    found[key] = block.step[at], block.ts[at] - run.created, block.mean[row][at]
    return found


def _read(reader: StoreReader, of_metadata: RunFigures) -> RunFigures:
    run_json = of_metadata.run.run_json
    of_steps = reader.find(Stream.STEPS)
    gpu = training_gpu(run_json)
    steps = reduced(reader, of_steps)
    newest = final_values.read_newest(reader, of_steps)
    ranks = run_json.get("world_size") or 1
    each = final_values.samples_of_steps(newest)
    samples = float(np.median(each)) * ranks if len(each) else None
    times = {key: typical(steps, key) for key in (STEP_TIME, "perf/mfu", *PHASES)}
    of_gpu = reader.find(Stream.DEVICES, gpu or "")
    energy, watts = final_values.energy_of(reduced(reader, of_gpu))
    step_time, mfu = times.pop(STEP_TIME), times.pop("perf/mfu")
    rate = final_values.samples_per_second(steps, newest, ranks)
    found = {"step_time": step_time, "mfu": mfu, "samples_per_s": rate}
    if energy is not None and watts is not None and ranks == 1:  # a job uses several GPUs
        found["energy"] = energy
        if samples and step_time:
            found["energy_per_sample"] = watts * step_time / samples
    found |= final_values.peaks(reduced(reader, reader.find(Stream.SAMPLES)))
    own = [key for key in steps.keys if key not in BY_KEY][:MAX_METRICS]
    metrics = final_values.metrics_of(steps, newest, (LOSS, "val/loss", "val/accuracy", *own))
    for key, values in metrics.items():
        found |= {f"final {key}": values["last"], f"best {key}": values.get("best")}
    known = {name: float(value) for name, value in found.items() if value is not None}
    return replace(
        of_metadata,
        values={**of_metadata.values, **known},
        phases={key: value for key, value in times.items() if value is not None},
        memory=_memory(reader, gpu),
        samples_per_step=samples,
        not_finite=tuple(key for key, each in metrics.items() if each["last"] is None),
    )


def _memory(reader: StoreReader, gpu: str | None) -> Mapping[str, int]:
    """Return the bytes of each category at the moment at which this process used most."""
    source = breakdown_source(reader.series(), gpu)
    if source is None:
        return {}
    readings = read_breakdown(reader, source, MAX_MEMORY_READINGS)
    return max(
        (reading.categories for reading in readings if reading.categories is not None),
        key=lambda categories: sum(size for key, size in categories.items() if key not in _FOREIGN),
        default={},
    )
