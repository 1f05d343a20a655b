"""The samples of a sweep as `samples.jsonl` has them, a line each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.lab.contest import Sample
from trainer.lab.folder import SAMPLES, SweepError


def read_samples(folder: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of a sweep so far that count, and the machine they were taken on.

    A last line that a kill has cut off is left out, and cut off in the file. Raises SweepError
    where another line is damaged.
    """
    path = folder / SAMPLES
    samples: list[Sample] = []
    machine: dict[str, Any] = {}
    if not path.exists():
        return samples, machine
    lines = path.read_bytes().split(b"\n")
    if lines.pop():  # after the last end of a line there is nothing, unless a kill came
        with path.open("r+b") as file:
            file.truncate(sum(len(line) + 1 for line in lines))
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            machine = machine or values.pop("machine", {})
            values.pop("machine", None)
            samples.append(Sample(**values))
        except (ValueError, TypeError, AttributeError) as error:
            raise SweepError(
                f"{folder.name}/{SAMPLES}: line {number} is no sample ({error}). Delete the line."
            ) from error
    return _newest(samples), machine


def _newest(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out what was measured of a round before a resumed sweep took that round again."""
    last: dict[tuple[str, int], int] = {}
    for one in samples:
        of = (one.contest, one.round)
        last[of] = max(last.get(of, 0), one.session)
    return [one for one in samples if one.session == last[one.contest, one.round]]
