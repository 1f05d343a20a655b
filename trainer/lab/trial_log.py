"""The trials of a sweep in `samples.jsonl`, one per line."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import open_for_append, read_regular_file
from trainer.lab.folder import SAMPLES, SweepError

MAX_BYTES = 256 * 2**20  # A trial has about 2 kB.
METRICS = (
    *("samples_per_sec", "mean_samples_per_sec", "step_time", "data_wait", "h2d", "gpu_time"),
    *("peak_allocated", "peak_reserved", "peak_process", "energy_per_sample", "loss", "mfu"),
)
"""Metrics of a trial that sweep.json has for each variant (docs/lab.md)."""
_Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one child process, or the `reason` of its failure.

    `contest` is the key of its comparison, `seconds` the wall time of the process, and `session`
    the number of times that the sweep had been resumed.
    """

    contest: str
    round: int
    name: str
    reason: str | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    ended: float = 0.0
    session: int = 0
    metrics: dict[str, Any] = {}
    machine: dict[str, Any] = {}

    @property
    def ok(self) -> bool:
        """True if the trial has metrics."""
        return self.reason is None


def read_samples(folder: Path) -> list[Trial]:
    """Return the valid trials of a sweep.

    An incomplete last line, of a killed process, is removed from the file. Raises SweepError for
    another invalid line.
    """
    path = folder / SAMPLES
    samples: list[Trial] = []
    try:
        lines = read_regular_file(path, MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return samples
    except (OSError, ValueError) as error:
        raise SweepError(f"{folder.name}/{SAMPLES}: cannot be read ({error}).") from error
    if lines.pop():
        with open(open_for_append(path), "wb") as file:
            file.truncate(sum(len(line) + 1 for line in lines))
    for number, text in enumerate(lines, start=1):
        try:
            samples.append(_decoded(text))
        except (ValueError, RecursionError) as error:
            raise SweepError(
                f"{folder.name}/{SAMPLES}: line {number} is no trial ({error}). Delete the line."
            ) from error
    # The trials of a round that a resumed sweep has repeated are invalid.
    last: dict[tuple[str, int], int] = {}
    for one in samples:
        key = (one.contest, one.round)
        last[key] = max(last.get(key, 0), one.session)
    return [one for one in samples if one.session == last[one.contest, one.round]]


def _decoded(text: bytes) -> Trial:
    sample = msgspec.json.decode(text, type=Trial)
    for name in METRICS:
        msgspec.convert(sample.metrics.get(name), _Finite | None)
    if sample.ok and (invalid := no_rate(sample.metrics)) is not None:
        raise ValueError(invalid)
    return sample


def no_rate(metrics: Mapping[str, Any]) -> str | None:
    """Return why metrics have no valid throughput, or None."""
    for name in ("samples_per_sec", "step_time"):
        value = metrics.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not is_number or not 0 < value < math.inf:
            return f"{name}: must be a number above 0, got {value!r}."
    return None
