"""Records of allocations that failed, made up."""

from __future__ import annotations

from dataclasses import replace

from stepscope.memory.oom.record import OomRecord

MIB = 2**20
GIB = 2**30
FULL = OomRecord(
    ts=1_800_000_000.0,
    step=0,
    steps_done=0,
    phase="forward",
    device=0,
    requested=300 * MIB,
    total=2 * GIB,
    allowed=2 * GIB,
    free=100 * MIB,
    allocated=1720 * MIB,
    reserved=1740 * MIB,
    others=0,
)
"""A GPU of 2 GiB that one process has filled before its first step was complete: 208 MiB of it are
the context's."""

PIECES = replace(
    FULL,
    step=20,
    steps_done=20,
    allocated=900 * MIB,
    reserved=1740 * MIB,
    peak_allocated=1500 * MIB,
)
"""After 20 steps: nearly half of the reserved memory is free in pieces, and more than the demand of
1,200 MiB was allocated at once before."""

OTHER = replace(
    FULL,
    allocated=600 * MIB,
    reserved=620 * MIB,
    others=1120 * MIB,
    holders="Process 77 (python)",
)
