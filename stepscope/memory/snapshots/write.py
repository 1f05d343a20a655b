"""Opens a snapshot and writes its summary: a process of its own, with limits.

    python -m stepscope.memory.snapshots.write SNAPSHOT SUMMARY

A foreign file may ask for any amount of memory and time, and a large honest one would hold the
interpreter of a training for half a minute. On stdout stand the bytes read so far, a line each MB;
on stderr one line where it failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stepscope.common.formatting import format_bytes, printable
from stepscope.common.limited_process import end_with_stdin, limit_process
from stepscope.memory.snapshots.load import REMEDY, SnapshotError, load
from stepscope.memory.snapshots.summary import summarize
from stepscope.memory.snapshots.summary_file import write_summary

MEMORY_LIMIT = 4 * 10**9
"""Bytes of address space: a history of 1 GB needs some 3 GB."""
CPU_LIMIT_S = 120
RESULT_LIMIT = 128 * 2**20


def main(arguments: Sequence[str]) -> int:
    """Do it; return the exit code."""
    snapshot, result = map(Path, arguments)
    limit_process(memory=MEMORY_LIMIT, cpu_s=CPU_LIMIT_S, file_bytes=RESULT_LIMIT)
    try:
        modified_ns = snapshot.stat().st_mtime_ns
        loaded = load(snapshot, progress=_say)
        write_summary(result, summarize(loaded), modified_ns)
    except MemoryError:
        return _fail(
            f"{snapshot.name}: must open with at most {format_bytes(MEMORY_LIMIT)} of memory, got "
            "one that needs more. Record fewer steps."
        )
    except (SnapshotError, OSError) as error:
        return _fail(str(error))
    except Exception as error:  # noqa: BLE001 - the page shows this one line
        what = f"{type(error).__name__}: {error}"[:200]
        return _fail(f"{snapshot.name}: cannot be summarized ({what}). {REMEDY}")
    return 0


def _say(read: int) -> None:
    sys.stdout.write(f"{read}\n")
    sys.stdout.flush()


def _fail(text: str) -> int:
    sys.stderr.write(printable(text) + "\n")
    return 1


if __name__ == "__main__":
    end_with_stdin()
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # to free ten million objects one by one would take seconds
