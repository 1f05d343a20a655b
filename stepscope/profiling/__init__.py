"""Profiles of a few steps: start and stop torch's profiler, and summarize its trace.

| file                 | what it does                                                         |
|----------------------|----------------------------------------------------------------------|
| `phase_ranges.py`    | names data, forward, backward and optimizer while a profile records  |
| `torch_profiler.py`  | starts and stops torch's profiler, in the thread that trains         |
| `profile_command.py` | the command that records a profile of a few steps                    |
| `chrome_trace.py`    | reads a Chrome trace                                                 |
| `trace_stats.py`     | time and memory by operator and phase; stacks folded into a tree     |
| `summary.py`         | the summary file and the process that makes it of a trace            |
"""

from __future__ import annotations


def trace_name(first: int, last: int, rank: int = 0) -> str:
    """Return the name of the trace of these steps in the run folder; each rank has its own.

    >>> trace_name(3, 7), trace_name(3, 7, rank=1)
    ('profile-step-3-7.json.gz', 'profile-step-3-7.rank1.json.gz')
    """
    return f"{_stem(first, last, rank)}.json.gz"


def summary_name(first: int, last: int, rank: int = 0) -> str:
    """Return the name of the summary beside the trace."""
    return f"{_stem(first, last, rank)}.summary.json"


def _stem(first: int, last: int, rank: int) -> str:
    return f"profile-step-{first}-{last}{f'.rank{rank}' if rank else ''}"
