"""Carved from stepscope/profiling/phases.py."""

from __future__ import annotations

DATA, FORWARD, BACKWARD, OPTIMIZER = PHASES = ("data", "forward", "backward", "optimizer")


OTHER = "other"
