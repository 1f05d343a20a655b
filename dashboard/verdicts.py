"""The findings about a run that its page shows: one line, and why its ranks wait."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dashboard.charts.rank_events import read_rank_events
from dashboard.out_of_memory import out_of_memory_line
from stepscope.common.metrics import Stream
from stepscope.diagnosis.classify import (
    BottleneckDiagnosis,
    BottleneckKind,
    IsSettingAllowed,
    verdict,
)
from stepscope.diagnosis.findings import straggler_of
from stepscope.diagnosis.step_window import recent_figures
from stepscope.distributed.hangs.cases import Hang
from stepscope.distributed.hangs.diagnose import hang_of
from stepscope.distributed.stragglers.detect import StragglerFinding
from stepscope.distributed.stragglers.reader import in_job
from stepscope.run import RunInfo, RunStatus
from stepscope.run_setup import setting_text, setup_of
from stepscope.store import StoreReader
from stepscope.store.final_values import last_value, read_newest
from stepscope.store.reader import EVERY
from stepscope.store.step_blocks import LOSS
from trainer.config import SETTINGS
from trainer.training.config_validation import TrainDevice, is_possible

Line = dict[str, Any]
"""A finding as JSON: kind, text, and a recommendation as `words` or as a `setting`."""


@dataclass(frozen=True, slots=True)
class RunFindings:
    """The page's diagnosis `line`, why the ranks of a `job` wait, and events of other ranks."""

    line: Line | None
    job: Line | None = None
    rank_events: list[dict[str, Any]] = field(default_factory=list)


def find(run: RunInfo, devices: Sequence[TrainDevice]) -> RunFindings:
    """Return the findings about a run; `devices` are those of this machine. Raises StoreError."""
    config = run.run_json.get("config") or {}
    allowed = functools.partial(is_possible, config=config, devices=devices)
    if not in_job(run.run_json):
        return RunFindings(out_of_memory_line(run, devices) or _store_line(run, allowed))
    hang = hang_of(run) if run.status.live else None
    straggler = straggler_of(run)
    line = out_of_memory_line(run, devices) or _job_line(hang)
    if line is None and straggler is not None and straggler.next is not None:
        line = _job_line(straggler)
    return RunFindings(
        line or _store_line(run, allowed),
        _job_line(hang or straggler),
        read_rank_events(run),
    )


def _job_line(found: Hang | StragglerFinding | None) -> Line | None:
    if found is None:
        return None
    kind = "hang" if isinstance(found, Hang) else found.kind.value
    return {"kind": kind, "ranks": list(found.ranks), "text": found.text, "words": found.next}


def _store_line(run: RunInfo, allowed: IsSettingAllowed) -> Line | None:
    """Return a loss that is not finite, or the bottleneck. Raises StoreError."""
    with StoreReader(run.folder) as reader:
        if run.status is not RunStatus.FAILED:
            line = _broken_loss(reader, run.status.live)
            if line is not None:
                return line
        figures = recent_figures(reader, run.run_json)
    return bottleneck_line(verdict(figures, setup_of(run.run_json, figures.step_time), allowed))


def _broken_loss(reader: StoreReader, live: bool) -> Line | None:
    """Return a NaN or infinite loss; in a live run it must still be so."""
    if live:
        infos = [info for info in reader.series() if info.stream == Stream.STEPS]
        values = [last_value(read_newest(reader, info), LOSS) for info in infos]
        if all(value is None or math.isfinite(value) for value in values):
            return None
    events = reader.events(limit=EVERY, kind="nan")
    if not events:
        return None
    return {
        "kind": BottleneckKind.NOT_FINITE.value,
        "text": f"{events[0].text.rstrip('.')}.",
        "words": "Try a lower learning rate, or clip the gradients.",
    }


def bottleneck_line(found: BottleneckDiagnosis) -> Line | None:
    """Return a bottleneck with the sidebar's setting to try; None if no cause is known."""
    if not (found.kind.names_a_cause or found.kind is BottleneckKind.SIMULATED):
        return None
    line = {"kind": found.kind.value, "text": found.text}
    step = found.next
    if step is None:
        return line
    if step.name is None:
        return line | {"words": step.text}
    setting = {
        "field": step.name,
        "value": step.value,
        "text": setting_text(step.name, step.value),
        "place": SETTINGS[step.name].group,
    }
    return line | {"setting": setting}
