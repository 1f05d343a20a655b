"""What is said above the strips: why a job hangs, or who holds the others up; pure."""

from __future__ import annotations

from typing import Any

from stepscope.distributed.hangs.job_state import Hang
from stepscope.distributed.stragglers.detect import StragglerVerdict

TEXT_LENGTH = 400
NEXT_LENGTH = 300
NAMED = 16


def rank_verdict(found: StragglerVerdict | None, hang: Hang | None) -> dict[str, Any] | None:
    """Return `kind`, `ranks`, `phase`, `share` (0 to 1), `text` and `next` of a verdict.

    A hang comes first: what was slow before it does not matter then. The kind "none" names nobody
    and its text says why. None before the first look.
    """
    if hang is not None:
        return _said("hang", hang.ranks, hang.phase, None, hang.text, hang.next)
    if found is None:
        return None
    kind, phase = found.kind.value, found.phase.value if found.phase is not None else None
    return _said(kind, found.ranks, phase, found.share, found.text, found.next)


def _said(
    kind: str,
    ranks: tuple[int, ...],
    phase: str | None,
    share: float | None,
    text: str,
    step: str | None,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "ranks": list(ranks[:NAMED]),
        "phase": phase,
        "share": None if share is None else round(share, 3),
        "text": text[:TEXT_LENGTH],
        "next": None if step is None else step[:NEXT_LENGTH],
    }
