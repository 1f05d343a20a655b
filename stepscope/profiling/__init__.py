"""Profiles of a few steps: torch's profiler, and the summary of its trace."""

from __future__ import annotations


def trace_name(first: int, last: int, rank: int = 0) -> str:
    """Return the name of the trace of these steps in the run folder; each rank has its own.

    >>> trace_name(3, 7), trace_name(3, 7, rank=1)
    ('profile-step-3-7.json.gz', 'profile-step-3-7.rank1.json.gz')
    """
    return f"{_stem(first, last, rank)}.json.gz"


def summary_name(first: int, last: int, rank: int = 0) -> str:
    """Return the name of the summary of this trace."""
    return f"{_stem(first, last, rank)}.summary.json"


def _stem(first: int, last: int, rank: int) -> str:
    return f"profile-step-{first}-{last}{f'.rank{rank}' if rank else ''}"
