"""Differences between recorded runs, and intervals of the change between two sets of them. Pure.

A run is one sample: its steps are not independent, and two runs of one script often differ by more
than the steps of one. So an interval needs two runs on each side (Welch's t of logarithms). All
intervals of a comparison share one error probability (Bonferroni). run.json is untrusted: a value
of an unexpected type is text, a long one is cut.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from stepscope.common import formatting
from stepscope.common.formatting import (
    format_bytes,
    format_duration,
    format_flop,
    format_short_time,
    printable,
    three_digits,
)
from stepscope.common.json_values import dict_of, flattened
from stepscope.common.metrics import BY_KEY
from stepscope.compare.figures import PHASES, RunFigures
from stepscope.lab.gate import METRICS, Gate, GateResult, GateVerdict, gate_result
from stepscope.lab.statistics import unpaired_interval
from stepscope.lab.verdict_text import signed
from stepscope.memory.breakdown import CATEGORIES
from stepscope.run import RunStatus
from stepscope.store.blocks import Floats

MAX_ROWS = 1000  # differences of a part
MAX_CHARS = 200
ALPHA = 0.05
MIN_RUNS = 2  # on each side, for an interval
MIN_EQUAL_RUNS = 3  # on each side, for a gate on peak memory that is the same in all of them
ROUNDING = 1e-9  # Largest difference of equal logarithms.
NO_INTERVAL = (
    "One pair of runs cannot distinguish a regression from run-to-run variation. Record at least "
    "two runs of each side."
)
NOT_COMPARABLE = "These runs are not directly comparable."
FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "samples_per_s": ("Samples/s", three_digits),
    "step_time": ("Step time", format_short_time),
    "mfu": ("MFU", "{:.1f}%".format),
    "peak_allocated": ("Peak allocated", format_bytes),
    "peak_reserved": ("Peak reserved", format_bytes),
    "peak_process": ("Peak process memory", format_bytes),
    "energy": ("Energy", formatting.format_energy),
    "energy_per_sample": ("Energy per sample", lambda joules: f"{three_digits(1e3 * joules)} mJ"),
    "duration": ("Duration", format_duration),
    "steps": ("Steps", "{:,.0f}".format),
}
"""Label and format of each figure; metrics of the training follow."""
PARTS = {
    "figures": "Figures",
    "phases": "Step phases",
    "memory": "Memory by category",
    "configuration": "Configuration",
    "environment": "Environment",
    "code": "Code",
}
_NOT_TESTED = frozenset(("steps", "duration", "energy", "samples_per_s"))
"""Totals, which depend on the length of a run, and the reciprocal of the step time."""
_PHASES = {key: (BY_KEY[key].label, format_short_time) for key in PHASES}
_MEMORY = {part.key: (part.label, format_bytes) for one in CATEGORIES.values() for part in one}


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A setting or figure with one value per run, None where a run has none."""

    key: str
    label: str
    values: tuple[Any, ...]
    changes: tuple[float | None, ...] = ()  # Fractions of the baseline; None on other hardware.

    def text(self, index: int) -> str | None:
        """Return the value of a run with its unit."""
        value = self.values[index]
        return value if value is None or isinstance(value, str) else kind_of(self.key)[1](value)

    def shown(self, index: int) -> str:
        """Return the value of a run, "not set" without one."""
        return "not set" if (text := self.text(index)) is None else text

    def cells(self) -> list[str | None]:
        """Return the text of each run with its change."""
        texts = [self.text(index) for index in range(len(self.values))]
        for index, change in enumerate(self.changes):
            texts[index] = f"{texts[index]} ({signed(change)})" if change else texts[index]
        return texts


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side; `runs` are their ids.

    `obstacles` are the reasons why runs are not comparable, `notes` the limits of a comparison.
    Settings are rows only if they differ. Phases are in seconds per step, memory is in bytes.
    """

    runs: tuple[str, ...]
    obstacles: tuple[str, ...]
    notes: tuple[str, ...]
    configuration: tuple[ComparisonRow, ...]
    environment: tuple[ComparisonRow, ...]
    code: tuple[ComparisonRow, ...]
    figures: tuple[ComparisonRow, ...]
    phases: tuple[ComparisonRow, ...]
    memory: tuple[ComparisonRow, ...]


def compare_runs(runs: Sequence[RunFigures], baseline: int = 0) -> Comparison:
    """Compare runs with one of them, the baseline."""
    hardware = [_hardware(one.run.run_json) for one in runs]
    of_baseline = hardware[baseline]
    comparable = [None in (one, of_baseline) or one == of_baseline for one in hardware]
    return Comparison(
        runs=tuple(one.run.id for one in runs),
        obstacles=obstacles(runs),
        notes=_notes(runs),
        configuration=differences([one.metadata.config for one in runs]),
        environment=differences([_environment(one) for one in runs]),
        code=differences([_code(one) for one in runs]),
        figures=_rows(FIGURES, [one.values for one in runs], baseline, comparable),
        phases=_rows(_PHASES, [one.phases for one in runs], baseline, comparable),
        memory=_rows(_MEMORY, [one.memory for one in runs], baseline, comparable),
    )


def kind_of(key: str) -> tuple[str, Callable[[float], str]]:
    """Return label and format of a figure, a phase or a category of memory."""
    which, _, metric = key.partition(" ")
    label = BY_KEY[metric].label if metric in BY_KEY else metric
    other = (_cut(f"{which.capitalize()} {label}"), "{:.4g}".format)
    return {**FIGURES, **_PHASES, **_MEMORY}.get(key, other)


def differences(each: Sequence[Mapping[str, Any]]) -> tuple[ComparisonRow, ...]:
    """Return the first MAX_ROWS entries that differ; nested ones have names with dots."""
    flat = [_flat(values) for values in each]
    rows = []
    for name in dict.fromkeys(name for values in flat for name in values):
        values = [one.get(name) for one in flat]
        if len(set(values)) > 1:
            texts = tuple(None if value is None else _cut_value(value) for value in values)
            rows.append(ComparisonRow(name, _cut(name), texts))
    return tuple(rows[:MAX_ROWS])


def obstacles(runs: Sequence[RunFigures]) -> tuple[str, ...]:
    """Return why runs are not comparable: other workloads, hardware or sizes."""
    aspects = [
        {
            "Workload": _workload(one),
            "Hardware": _hardware(one.run.run_json),
            "Ranks": one.run.world_size,
            "Parameters of the model": one.run.run_json.get("parameters"),
            "FLOP per step": (flop := one.run.run_json.get("flops_per_step")) and format_flop(flop),
            "Samples per step": one.samples_per_step and f"{one.samples_per_step:.4g}",
        }
        for one in runs
    ]
    known = ((row.label, set(row.values) - {None}) for row in differences(aspects))
    return tuple(f"{name}: {'; '.join(sorted(found))}." for name, found in known if len(found) > 1)


@dataclass(frozen=True, slots=True)
class SideRow:
    """A figure of two sides: means, and the change as fractions; None where unknown.

    The means are geometric, or arithmetic without a change if a value is not above 0.
    `is_different`: the interval excludes 0; None without an interval. `is_equal`: the runs of each
    side have one value, so that their spread is unknown.
    """

    key: str
    label: str
    base: float
    new: float
    change: float | None = None
    low: float | None = None
    high: float | None = None
    is_different: bool | None = None
    is_equal: bool = False


def compare_sides(base: Sequence[RunFigures], new: Sequence[RunFigures]) -> tuple[SideRow, ...]:
    """Return the figures that all runs have. Raises SweepError without SciPy."""
    both = (*base, *new)
    enough = min(len(base), len(new)) >= MIN_RUNS
    known = dict.fromkeys((*FIGURES, *(key for one in both for key in one.values)))
    keys = [key for key in known if all(key in one.values for one in both)]
    tested = [key for key in keys if enough and key not in _NOT_TESTED and _positive(key, both)]
    spread = {key for key in tested if _has_spread(key, base, new)}
    rows = []
    for key in keys:
        old, changed, label = _values(key, base), _values(key, new), kind_of(key)[0]
        if not _positive(key, both):
            rows.append(SideRow(key, label, float(old.mean()), float(changed.mean())))
            continue
        means = [float(np.exp(np.log(side).mean())) for side in (old, changed)]
        row = SideRow(key, label, means[0], means[1], means[1] / means[0] - 1)
        if key in spread:
            _, low, high = unpaired_interval(old, changed, ALPHA / len(spread))
            row = replace(row, low=low, high=high, is_different=low > 0 or high < 0)
        rows.append(replace(row, is_equal=key in tested and key not in spread))
    return tuple(rows)


def check_runs(
    base: Sequence[RunFigures], new: Sequence[RunFigures], gates: Sequence[Gate]
) -> list[GateResult]:
    """Return the result of each gate. Raises ValueError for a metric that runs did not record."""
    results, both = [], (*base, *new)
    for gate in gates:
        key = next((key for key in METRICS[gate.metric] if _positive(key, both)), None)
        if key is None:
            text = f"{gate.metric} was not recorded in every run. Remove this gate."
            raise ValueError(f"--gate: {text}")
        result = GateResult(gate, "new", GateVerdict.INCONCLUSIVE, len(both))
        old, changed, fewest = _values(key, base), _values(key, new), min(len(base), len(new))
        if fewest >= MIN_RUNS and _has_spread(key, base, new):
            interval = unpaired_interval(old, changed, ALPHA / len(gates))
            result = gate_result(gate, "new", len(both), interval)
        elif fewest >= MIN_RUNS:
            change = float(changed[0] / old[0] - 1)
            result = replace(result, change=change)
            # Equal times are a coincidence of rounding, but allocations are often reproduced.
            if gate.metric == "peak_memory" and fewest >= MIN_EQUAL_RUNS:
                exact = gate_result(gate, "new", len(both), (change, change, change))
                result = replace(result, verdict=exact.verdict)
        results.append(result)
    return results


def _values(key: str, runs: Sequence[RunFigures]) -> Floats:
    return np.array([one.values[key] for one in runs])


def _has_spread(key: str, *sides: Sequence[RunFigures]) -> bool:
    """Return True if the runs of a side have several values."""
    return any(np.ptp(np.log(_values(key, side))) > ROUNDING for side in sides)


def _positive(key: str, runs: Sequence[RunFigures]) -> bool:
    """Return True if all runs have a value with a logarithm."""
    return all(0 < one.values.get(key, 0.0) < math.inf for one in runs)


def _notes(runs: Sequence[RunFigures]) -> tuple[str, ...]:
    found = [f"{one.run.id}: {one.problem}" for one in runs if one.problem is not None]
    found += [f"{one.run.id} is still running." for one in runs if one.run.status.live]
    for one in runs:
        if one.run.status in (RunStatus.FAILED, RunStatus.CRASHED):
            reason = _cut(one.run.reason or "no reason").rstrip(".")
            found.append(f"{one.run.id} {one.run.status}: {reason}.")
        if one.not_finite:
            keys = ", ".join(one.not_finite)
            found.append(f"{one.run.id}: not finite (NaN or infinite): {keys}.")
    if len({one.values.get("steps") for one in runs}) > 1:
        found.append("The runs differ in steps: final, best and total values are not comparable.")
    return tuple(map(printable, found))


def _workload(one: RunFigures) -> Any:
    path = dict_of(one.run.run_json.get("script")).get("path")
    if isinstance(path, str):
        return path.rpartition("/")[2]
    return one.metadata.config.get("workload") or one.run.run_json.get("name")


def _hardware(run_json: Mapping[str, Any]) -> Any:
    found = dict_of(run_json.get("environment"))
    cpu = found.get("cpu") and f"{found['cpu']}, {found.get('cores')} cores"
    return found.get("gpu") or cpu


def _environment(one: RunFigures) -> dict[str, Any]:
    packages = (one.metadata.packages or {}).items()
    found = dict_of(one.run.run_json.get("environment")) | {"commit": None}  # it is of the code
    return found | {f"package {name}": version for name, version in packages}


def _code(one: RunFigures) -> dict[str, Any]:
    script = dict_of(one.run.run_json.get("script"))
    git = {} if one.metadata.git is None else msgspec.to_builtins(one.metadata.git)
    git.pop("diff", None)  # "dirty", or "uncommitted" below
    commit = dict_of(one.run.run_json.get("environment")).get("commit")
    found = {f"script {name}": script.get(name) for name in ("path", "arguments")}
    if one.code_diff is not None:
        crc = zlib.crc32(one.code_diff.encode(errors="replace"))
        found["uncommitted"] = f"{one.code_diff.count(chr(10))} lines, CRC {crc:08x}"
    return {"commit": commit} | git | found


def _rows(
    order: Collection[str],
    each: Sequence[Mapping[str, float]],
    baseline: int,
    comparable: Sequence[bool],
) -> tuple[ComparisonRow, ...]:
    """Return a row for each key, those of `order` first; only `comparable` runs have changes."""
    rows = []
    for key in dict.fromkeys((*order, *(key for values in each for key in values))):
        values = tuple(one.get(key) for one in each)
        changes = tuple(
            _change(values[baseline], value) if is_comparable else None
            for value, is_comparable in zip(values, comparable, strict=True)
        )
        if any(key in one for one in each):
            rows.append(ComparisonRow(key, kind_of(key)[0], values, changes))
    return tuple(rows)


def _change(base: float | None, value: float | None) -> float | None:
    change = (value - base) / abs(base) if base and value is not None else math.nan
    return change if math.isfinite(change) else None


def _flat(values: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        name: value if value is None or isinstance(value, str) else json.dumps(value)
        for name, value in flattened(values).items()
    }


def _cut(text: str) -> str:
    return printable(text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…")


def _cut_value(text: str) -> str:
    """Return the text; a long one cut, with its checksum, so that other ones differ from it."""
    checksum = f" (CRC {zlib.crc32(text.encode(errors='replace')):08x})"
    return _cut(text) + (checksum if len(text) > MAX_CHARS else "")
