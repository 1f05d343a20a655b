"""How a run ended that no recorder tells of: it never began, or was killed with its process."""

from __future__ import annotations

from pathlib import Path

from stepscope.recorder.recovery import note_end
from stepscope.run import RunStatus

WORKER_LOG = "worker.log"
"""What a training process prints; of a job: torchrun, beside a file of each rank."""


def not_started(folder: Path, reason: str | None = None) -> None:
    """Note that training never began, if it did not: stopped, or failed for this reason."""
    status = RunStatus.STOPPED if reason is None else RunStatus.FAILED
    text = reason or "Stopped before training began."
    note_end(folder, status, text, instead_of=(RunStatus.PENDING,))


def cut_off(step: int) -> str:
    """Say that the server's end cut off a run after this step."""
    return (
        f"The server was shut down while the run was busy after step {step}. What it had recorded "
        "is kept; a checkpoint that was being written is not."
    )
