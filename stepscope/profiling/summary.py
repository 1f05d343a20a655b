"""Summarize a profile's trace in a child process; write and parse the summary file.

A run folder may come from others, so `parse` checks all sizes and types.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_replace, atomic_write
from stepscope.common.formatting import format_bytes
from stepscope.profiling.chrome_trace import ChromeTrace, leave_out_own, main_thread, read_trace
from stepscope.profiling.phase_ranges import OTHER, PHASES
from stepscope.profiling.trace_stats import (
    NAME_LIMIT,
    NODES_LIMIT,
    FlameGraph,
    OperatorStats,
    PhaseTimes,
    fold,
    operators,
    phases,
)

SCHEMA = 1
OPERATORS_LIMIT = 300
"""Operators in the table; what the others took is in `operators_left`."""
BYTES_LIMIT = 8 * 2**20
"""A summary of all nodes and operators has at most a third of it."""
_NUMBER_LIMIT = 1e18


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """What the page shows of a profile; times in microseconds, memory in bytes."""

    first: int
    last: int
    """First and last step in it."""
    cuda: bool
    """Whether kernels were asked for; without it all CUDA times are zero and mean nothing."""
    stacks: bool
    operators: list[OperatorStats]
    operators_left: int
    """Further operators, which took less time than any of those."""
    phases: PhaseTimes
    flame: FlameGraph


def summarize(
    trace: ChromeTrace, *, first: int, last: int, cuda: bool, thread: int | None
) -> ProfileSummary:
    """Return the summary of a trace of these steps. Raises ValueError where it has no operators."""
    trains = main_thread(trace, thread)
    if trains is None:
        raise ValueError("the trace has no operators: no torch code ran in the profiled thread")
    own = leave_out_own(trace, trains)
    found = operators(trace)
    return ProfileSummary(
        first=first,
        last=last,
        cuda=cuda,
        stacks=bool(trace.frames.get(trains)),
        operators=found[:OPERATORS_LIMIT],
        operators_left=max(0, len(found) - OPERATORS_LIMIT),
        phases=phases(trace, trains, own),
        flame=fold(trace, trains),
    )


def to_text(summary: ProfileSummary) -> str:
    """Return the summary as `parse` reads it."""
    content = {"schema": SCHEMA, **asdict(summary)}
    return json.dumps(_rounded(content), separators=(",", ":"))


def parse(text: str) -> ProfileSummary:
    """Return a summary. Raises ValueError, with a sentence, for what is none."""
    if len(text) > BYTES_LIMIT:
        raise ValueError(f"must have at most {BYTES_LIMIT} bytes, got {len(text)}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"must be an object of schema {SCHEMA}")
    listed = _list(content, "operators", OPERATORS_LIMIT)
    return ProfileSummary(
        first=_whole(content, "first"),
        last=_whole(content, "last"),
        cuda=content.get("cuda") is True,
        stacks=content.get("stacks") is True,
        operators=[_operator(row) for row in listed],
        operators_left=_whole(content, "operators_left"),
        phases=_phases(content.get("phases")),
        flame=_flame(content.get("flame")),
    )


def _operator(row: Any) -> OperatorStats:
    content = _object(row, "operators")
    numbers: dict[str, Any] = {}
    for part in fields(OperatorStats)[1:]:
        exact = part.type == "int"
        numbers[part.name] = _whole(content, part.name) if exact else _number(content, part.name)
    return OperatorStats(_text(content.get("name")), **numbers)


def _phases(content: Any) -> PhaseTimes:
    found = _object(content, "phases")
    both = []
    for key in ("cpu_us", "cuda_us"):
        times = _object(found.get(key), key)
        both.append({phase: max(0.0, _number(times, phase)) for phase in (*PHASES, OTHER)})
    return PhaseTimes(*both)


def _flame(content: Any) -> FlameGraph:
    found = _object(content, "flame")
    names = [_text(name) for name in _list(found, "names", NODES_LIMIT + 1)]
    columns = {key: _list(found, key, NODES_LIMIT + 1) for key in _COLUMNS}
    count = len(columns["parent"])
    if any(len(column) != count for column in columns.values()):
        raise ValueError("flame: all columns must have the same length")
    for node, (name, parent) in enumerate(zip(columns["name"], columns["parent"], strict=True)):
        if type(name) is not int or not 0 <= name < len(names):
            raise ValueError("flame: name must be an index of names")
        if type(parent) is not int or not -1 <= parent < node:
            raise ValueError("flame: parent must be an earlier node, or -1")
    return FlameGraph(
        names,
        columns["name"],
        columns["parent"],
        [max(0.0, _checked("total_us", us)) for us in columns["total_us"]],
        [int(_checked("calls", calls)) for calls in columns["calls"]],
        _whole(found, "left_out"),
    )


_COLUMNS = ("name", "parent", "total_us", "calls")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: must be an object")
    return value


def _list(content: dict[str, Any], name: str, limit: int) -> list[Any]:
    value = content.get(name)
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"{name}: must be a list of at most {limit}")
    return value


def _number(content: dict[str, Any], name: str) -> float:
    return _checked(name, content.get(name))


def _checked(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _NUMBER_LIMIT:
        raise ValueError(f"{name}: must be a finite number")
    return float(value)


def _whole(content: dict[str, Any], name: str) -> int:
    return int(_checked(name, content.get(name)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("name: must be a text")
    return "".join(char if char.isprintable() else "�" for char in value[:NAME_LIMIT])


def _rounded(value: Any) -> Any:
    """Round to a tenth of a microsecond, which is finer than the clock."""
    if isinstance(value, float):
        return round(value, 1)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


RAW_LIMIT = 512 * 2**20
"""A larger trace is thrown away: some two million events, for which Perfetto needs gigabytes."""
LEVEL = 4
"""Of gzip: a fourteenth of the size at 200 MB/s; 9 takes five times as long for a tenth less."""
NICENESS = 10


class TraceTooLargeError(Exception):
    """The trace has more bytes than is sensible to keep; the message is a sentence."""


def trace_name(first: int, last: int, rank: int = 0) -> str:
    """Return the name of the trace of these steps in the run folder; each rank has its own.

    >>> trace_name(3, 7), trace_name(3, 7, rank=1)
    ('profile-step-3-7.json.gz', 'profile-step-3-7.rank1.json.gz')
    """
    return f"profile-step-{first}-{last}{_of_rank(rank)}.json.gz"


def summary_name(first: int, last: int, rank: int = 0) -> str:
    """Return the name of the summary beside the trace."""
    return f"profile-step-{first}-{last}{_of_rank(rank)}.summary.json"


def _of_rank(rank: int) -> str:
    return f".rank{rank}" if rank else ""


def write_profile(
    folder: Path,
    raw: Path,
    *,
    first: int,
    last: int,
    cuda: bool,
    thread: int | None,
    rank: int = 0,
) -> None:
    """Write the trace `raw` compressed and summarized into `folder`, the summary last.

    Raises TooLarge, OSError, and ValueError where it is no trace; then a compressed trace may be
    there without a summary.
    """
    size = raw.stat().st_size
    if size > RAW_LIMIT:
        raise TraceTooLargeError(
            f"the trace has {format_bytes(size)}, more than the {format_bytes(RAW_LIMIT)} that are "
            "kept; profile fewer steps"
        )
    with (
        atomic_replace(folder / trace_name(first, last, rank), durable=False) as part,
        raw.open("rb") as source,
        gzip.GzipFile("", "wb", LEVEL, part) as packed,
    ):
        shutil.copyfileobj(source, packed, 2**20)
    trace = read_trace(raw.read_text("utf-8", "replace"))
    summary = summarize(trace, first=first, last=last, cuda=cuda, thread=thread)
    atomic_write(folder / summary_name(first, last, rank), to_text(summary))


def main(arguments: Sequence[str]) -> int:
    """Do it, and remove the raw trace; on stderr stands one line where that failed."""
    folder, raw = Path(arguments[0]), Path(arguments[1])
    first, last, cuda, thread, rank = map(int, arguments[2:])
    os.nice(NICENESS)
    try:
        write_profile(
            folder, raw, first=first, last=last, cuda=bool(cuda), thread=thread, rank=rank
        )
    except (TraceTooLargeError, OSError, ValueError, MemoryError) as error:
        sys.stderr.write(f"{error or type(error).__name__}\n")
        return 1
    finally:
        raw.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
