"""Compresses a trace and writes its summary: a process of its own, so that training goes on.

    python -m stepscope.profiling.write FOLDER RAW FIRST LAST CUDA THREAD

A trace of seconds has hundreds of thousands of events: to look at them in the training process
would hold its interpreter for as many seconds.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from stepscope.common.files import atomic_replace, atomic_write
from stepscope.common.formatting import format_bytes
from stepscope.profiling.chrome_trace import read_trace
from stepscope.profiling.summary import summarize, to_text

RAW_LIMIT = 512 * 2**20
"""A larger trace is thrown away: some two million events, for which Perfetto needs gigabytes."""
LEVEL = 4
"""Of gzip: a fourteenth of the size at 200 MB/s; 9 takes five times as long for a tenth less."""
NICENESS = 10


class TooLarge(Exception):
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
        raise TooLarge(
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
    except (TooLarge, OSError, ValueError, MemoryError) as error:
        sys.stderr.write(f"{error or type(error).__name__}\n")
        return 1
    finally:
        raw.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
