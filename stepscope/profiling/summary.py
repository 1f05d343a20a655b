"""Summarize a profile's trace in a child process; write and parse the untrusted summary file."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from stepscope.common.files import atomic_replace, atomic_write
from stepscope.common.formatting import format_bytes, printable
from stepscope.profiling import summary_name, trace_name, trace_stats
from stepscope.profiling.chrome_trace import ChromeTrace
from stepscope.profiling.phase_ranges import OTHER, PHASES
from stepscope.profiling.trace_stats import NODES_LIMIT, Count, FlameGraph

OPERATORS_LIMIT = 300  # Maximum number of operators; the others are in `operators_left`.
BYTES_LIMIT = 8 * 2**20  # Three times a summary with all nodes and operators.


class ProfileSummary(msgspec.Struct, tag_field="schema", tag=1):
    """Summary of the steps `first` to `last`; times in microseconds, memory in bytes.

    Without `cuda` all CUDA times are zero. `operators_left` counts further operators.
    """

    first: Count
    last: Count
    cuda: bool
    stacks: bool
    operators: Annotated[list[trace_stats.OperatorStats], msgspec.Meta(max_length=OPERATORS_LIMIT)]
    operators_left: Count
    phases: trace_stats.PhaseTimes
    flame: FlameGraph


def summarize(
    trace: ChromeTrace, *, first: int, last: int, cuda: bool, thread: int | None
) -> ProfileSummary:
    """Return the summary of a trace of these steps. Raises ValueError without operators."""
    trains = trace.main_thread(thread)
    if trains is None:
        raise ValueError("the trace has no operators: no torch code ran in the profiled thread")
    own = trace.leave_out_own(trains)
    found = trace_stats.operators(trace)
    return ProfileSummary(
        first=first,
        last=last,
        cuda=cuda and bool(trace.gpu),
        stacks=bool(trace.frames.get(trains)),
        operators=found[:OPERATORS_LIMIT],
        operators_left=max(0, len(found) - OPERATORS_LIMIT),
        phases=trace_stats.phases(trace, trains, own),
        flame=trace_stats.fold(trace, trains),
    )


def to_text(summary: ProfileSummary) -> str:
    """Return the summary as JSON, rounded to a tenth of a microsecond."""
    content = json.loads(msgspec.json.encode(summary), parse_float=lambda us: round(float(us), 1))
    return json.dumps(content, separators=(",", ":"))


def parse(text: str) -> ProfileSummary:
    """Return an untrusted summary. Raises ValueError with a sentence if it is malformed."""
    if len(text) > BYTES_LIMIT:
        raise ValueError(f"must have at most {BYTES_LIMIT} bytes, got {len(text)}")
    try:
        summary = msgspec.json.decode(text, type=ProfileSummary)
    except msgspec.ValidationError as error:
        raise ValueError(f"must be the summary of a profile: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({type(error).__name__})") from None
    for times in (summary.phases.cpu_us, summary.phases.cuda_us):
        if times.keys() != {*PHASES, OTHER}:
            raise ValueError("phases: must have each phase once")
    _check(summary.flame)
    summary.operators = [replace(one, name=_shown(one.name)) for one in summary.operators]
    summary.flame.names = list(map(_shown, summary.flame.names))
    return summary


def _check(flame: FlameGraph) -> None:
    if not len(flame.name) == len(flame.parent) == len(flame.total_us) == len(flame.calls):
        raise ValueError("flame: all columns must have the same length")
    if max(len(flame.name), len(flame.names)) > NODES_LIMIT + 1:
        raise ValueError(f"flame: must have at most {NODES_LIMIT + 1} nodes")
    if not all(0 <= name < len(flame.names) for name in flame.name):
        raise ValueError("flame: name must be an index of names")
    if not all(-1 <= parent < node for node, parent in enumerate(flame.parent)):
        raise ValueError("flame: parent must be an earlier node, or -1")


def _shown(name: str) -> str:
    return printable(name[: trace_stats.NAME_LIMIT])


RAW_LIMIT = 512 * 2**20  # Of a trace: two million events, for which Perfetto needs gigabytes.
LEVEL = 4  # Of gzip: 1/14 of the size at 200 MB/s; 9 takes five times as long for 10% less.
NICENESS = 10


def write_profile(
    folder: Path, raw: Path, *, first: int, last: int, cuda: bool, thread: int | None, rank: int = 0
) -> None:
    """Write the compressed trace `raw`, and then its summary, into `folder`.

    Raises OSError, and ValueError if `raw` is too large or malformed; a compressed trace may then
    exist without a summary.
    """
    size = raw.stat().st_size
    if size > RAW_LIMIT:
        raise ValueError(
            f"the trace has {format_bytes(size)}, more than the {format_bytes(RAW_LIMIT)} that are "
            "kept; profile fewer steps"
        )
    with (
        atomic_replace(folder / trace_name(first, last, rank), durable=False) as part,
        raw.open("rb") as source,
        gzip.GzipFile("", "wb", LEVEL, part) as packed,
    ):
        shutil.copyfileobj(source, packed, 2**20)
    with raw.open("rb") as source:
        trace = ChromeTrace(source)
    summary = summarize(trace, first=first, last=last, cuda=cuda, thread=thread)
    atomic_write(folder / summary_name(first, last, rank), to_text(summary))


def main(arguments: Sequence[str]) -> int:
    """Run `write_profile` and delete the raw trace; print one line to stderr if it fails."""
    folder, raw = Path(arguments[0]), Path(arguments[1])
    first, last, cuda, thread, rank = map(int, arguments[2:])
    os.nice(NICENESS)
    try:
        write_profile(
            folder, raw, first=first, last=last, cuda=bool(cuda), thread=thread, rank=rank
        )
    except (OSError, ValueError, MemoryError) as error:
        sys.stderr.write(f"{error or type(error).__name__}\n")
        return 1
    finally:
        raw.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
