"""The samples of a sweep as `samples.jsonl` has them, a line each."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.common.files import open_for_append, read_regular_file
from trainer.lab.comparison import Sample
from trainer.lab.folder import SAMPLES, SweepError
from trainer.lab.result_json import METRICS

BYTES_LIMIT = 256 * 2**20
"""A sample has some 2 kB."""


def read_samples(folder: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of a sweep so far that count, and the machine they were taken on.

    A last line that a kill has cut off is left out, and cut off in the file. Raises SweepError
    where another line is damaged.
    """
    path = folder / SAMPLES
    samples: list[Sample] = []
    machine: dict[str, Any] = {}
    try:
        lines = read_regular_file(path, BYTES_LIMIT).split(b"\n")
    except FileNotFoundError:
        return samples, machine
    except (OSError, ValueError) as error:
        raise SweepError(f"{folder.name}/{SAMPLES}: cannot be read ({error}).") from error
    if lines.pop():  # after the last end of a line there is nothing, unless a kill came
        with open(open_for_append(path), "wb") as file:
            file.truncate(sum(len(line) + 1 for line in lines))
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            machine = machine or values.pop("machine", {})
            values.pop("machine", None)
            samples.append(_checked(Sample(**values)))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SweepError(
                f"{folder.name}/{SAMPLES}: line {number} is no sample ({error}). Delete the line."
            ) from error
    return _newest(samples), machine


def no_rate(metrics: Mapping[str, Any]) -> str | None:
    """Say why metrics hold no rate that could be compared; None where they do."""
    for name in ("samples_per_sec", "step_time"):
        value = metrics.get(name)
        if value is None or not _is_number(value) or not 0 < value < math.inf:
            return f"{name}: must be a number above 0, got {value!r}."
    return None


def _checked(sample: Sample) -> Sample:
    """Return a sample whose values have their types. Raises TypeError and ValueError."""
    kinds = (("contest", str), ("name", str), ("round", int), ("session", int), ("metrics", dict))
    for name, kind in kinds:
        if not isinstance(getattr(sample, name), kind):
            raise TypeError(f"{name}: got {str(getattr(sample, name))[:60]!r}")
    if not isinstance(sample.reason, str | None):
        raise TypeError(f"reason: got {str(sample.reason)[:60]!r}")
    if not _is_number(sample.seconds) or not 0 <= sample.seconds < 10**9:
        raise ValueError(f"seconds: got {str(sample.seconds)[:60]!r}")
    for name in METRICS:
        value = sample.metrics.get(name)
        if value is not None and not (_is_number(value) and abs(value) <= sys.float_info.max):
            raise ValueError(f"{name}: got {str(value)[:60]!r}")
    if sample.ok and (reason := no_rate(sample.metrics)) is not None:
        raise ValueError(reason)
    return sample


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _newest(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out what was measured of a round before a resumed sweep took that round again."""
    last: dict[tuple[str, int], int] = {}
    for one in samples:
        of = (one.contest, one.round)
        last[of] = max(last.get(of, 0), one.session)
    return [one for one in samples if one.session == last[one.contest, one.round]]
