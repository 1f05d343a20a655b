"""The bottleneck diagnosis that the page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stepscope.common.metrics import Stream
from stepscope.diagnosis.classify import (
    BottleneckDiagnosis,
    BottleneckKind,
    IsSettingAllowed,
    verdict,
)
from stepscope.diagnosis.step_window import recent_figures
from stepscope.distributed.hangs.cases import Hang
from stepscope.distributed.stragglers.detect import StragglerFinding
from stepscope.run import RunInfo, RunStatus
from stepscope.run_setup import Recommendation, setting_text, setup_of
from stepscope.store import StoreReader
from stepscope.store.final_values import last_value, read_newest
from stepscope.store.reader import EVERY
from stepscope.store.step_blocks import LOSS


def diagnose(
    run: RunInfo, straggler: StragglerFinding | None, allowed: IsSettingAllowed
) -> BottleneckDiagnosis | None:
    """Return the diagnosis of a run to show, if any. Raises StoreError.

    `allowed(field, value)` is True for settings that this machine supports.
    """
    with StoreReader(run.folder) as reader:
        figures = recent_figures(reader, run.run_json)
        found = (
            _straggler(straggler)
            or (None if run.status is RunStatus.FAILED else _broken_loss(reader, run.status.live))
            or verdict(figures, setup_of(run.run_json, figures.step_time), allowed)
        )
    is_shown = found.kind.names_a_cause or found.kind is BottleneckKind.SIMULATED
    return found if is_shown else None


def _straggler(found: StragglerFinding | None) -> BottleneckDiagnosis | None:
    """Return a straggler as the diagnosis of the run: it outranks any other."""
    if found is None or found.next is None:
        return None
    step = Recommendation(text=found.next)
    kind = BottleneckKind.STRAGGLER
    return BottleneckDiagnosis(kind=kind, text=found.text, share=found.share, next=step)


def _broken_loss(reader: StoreReader, live: bool) -> BottleneckDiagnosis | None:
    """Return a NaN or infinite loss as the diagnosis; in a live run it must still be so."""
    if live:
        infos = [info for info in reader.series() if info.stream == Stream.STEPS]
        values = [last_value(read_newest(reader, info), LOSS) for info in infos]
        if all(value is None or math.isfinite(value) for value in values):
            return None
    events = reader.events(limit=EVERY, kind="nan")
    if not events:
        return None
    step = Recommendation(text="Try a lower learning rate, or clip the gradients.")
    text = f"{events[0].text.rstrip('.')}."
    return BottleneckDiagnosis(kind=BottleneckKind.NOT_FINITE, text=text, share=0.0, next=step)


def rank_verdict(hang: Hang | None, straggler: StragglerFinding | None) -> dict[str, Any] | None:
    """Return the hang or straggler; kind "none" has a reason. None before the first analysis."""
    found = hang or straggler
    if found is None:
        return None
    kind = "hang" if isinstance(found, Hang) else found.kind.value
    return {"kind": kind, "ranks": list(found.ranks), "text": found.text, "words": found.next}


def as_json(found: BottleneckDiagnosis | None, places: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the diagnosis line with a suggestion; `places`: the sidebar group of each setting."""
    if found is None:
        return None
    step = found.next
    drawn: dict[str, Any] = {"kind": found.kind.value, "text": found.text}
    if step is None:
        return drawn
    if step.name is None:
        return drawn | {"words": step.text}
    text = setting_text(step.name, step.value)
    setting = {"field": step.name, "value": step.value, "text": text}
    return drawn | {"setting": setting | {"place": places.get(step.name)}}
