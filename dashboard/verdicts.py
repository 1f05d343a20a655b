"""The verdict that the page shows of a run: worked out every few seconds, and slow to change.

All tabs poll twice a second, and each poll takes time from a training thread in this process. So a
verdict is made at most every EVERY_S seconds for all of them together, in 2 ms. One that is shown
stays for HOLD_S, and another takes its place only when it was found twice in a row.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dashboard.run_look import RunLook, recent
from stepscope.bottleneck.classify import (
    BottleneckDiagnosis,
    BottleneckKind,
    IsSettingAllowed,
    verdict,
)
from stepscope.bottleneck.recommendations import Recommendation, setting_text
from stepscope.bottleneck.step_window import recent_figures, setup_of
from stepscope.distributed.hangs.job_state import Hang
from stepscope.distributed.stragglers.detect import StragglerVerdict
from stepscope.run import RunInfo, RunKind, RunStatus
from stepscope.store import StoreReader
from stepscope.store.reader import EVERY

EVERY_S = 3.0
HOLD_S = 10.0
KEPT = 64  # Runs whose verdict is kept.


@dataclass(slots=True)
class DisplayedDiagnosis:
    """What is shown of a run, and what was found last; times on a monotonic clock."""

    looked: float
    verdict: BottleneckDiagnosis | None = None
    since: float = 0.0  # When its kind was first shown.
    written: float = 0.0  # When its text was.
    found: BottleneckKind | None = None
    is_new: bool = True
    is_final: bool = False

    def settle(self, found: BottleneckDiagnosis, now: float) -> None:
        """Take what was found: at once where nothing was known of the run before."""
        told = found if found.kind.names_a_cause else None
        kind = told.kind if told is not None else None
        shown = self.verdict.kind if self.verdict is not None else None
        if kind == shown:
            if now - self.written >= HOLD_S:
                self.verdict, self.written = told, now
        elif self.is_new or (kind == self.found and (shown is None or now - self.since >= HOLD_S)):
            self.verdict, self.since, self.written = told, now, now
        self.found, self.is_new = kind, False


class Verdicts:
    """One a server; `of` may be called from any thread."""

    def __init__(
        self, stragglers: RunLook[StragglerVerdict], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._stragglers = stragglers
        self._lock = threading.Lock()
        self._shown: OrderedDict[str, DisplayedDiagnosis] = OrderedDict()

    def of(
        self, reader: StoreReader, run: RunInfo, allowed: IsSettingAllowed
    ) -> BottleneckDiagnosis | None:
        """Return the verdict to show; None where there is nothing to say. Raises StoreError.

        `allowed(field, value)` says which settings are possible on this machine.
        """
        if run.run_json.get("kind") == RunKind.RECORD:
            return None
        now, live = self._clock(), run.status.live
        with self._lock:
            shown = recent(self._shown, str(run.folder), lambda: DisplayedDiagnosis(now), KEPT)
            if not shown.is_new and (shown.is_final or (live and now - shown.looked < EVERY_S)):
                return shown.verdict
            shown.looked = now
        figures = recent_figures(reader, run.run_json)
        found = (
            _straggler(self._stragglers.of(run))
            or (None if live or run.status is RunStatus.FAILED else _broken_loss(reader))
            or verdict(figures, setup_of(run.run_json, figures.step_time), allowed)
        )
        with self._lock:
            if not live:  # what is found last stays
                shown.verdict, shown.is_new, shown.is_final = None, True, True
            shown.settle(found, now)
            return shown.verdict


def _straggler(found: StragglerVerdict | None) -> BottleneckDiagnosis | None:
    """Return a rank that holds the others up as the verdict of the run: it comes first."""
    if found is None or found.next is None:
        return None
    return BottleneckDiagnosis(
        kind=BottleneckKind.STRAGGLER,
        text=found.text,
        share=found.share,
        next=Recommendation(text=found.next),
    )


def _broken_loss(reader: StoreReader) -> BottleneckDiagnosis | None:
    """Return the verdict of a run whose loss became NaN or infinite and that ended otherwise."""
    broken = [event for event in reader.events(limit=EVERY) if event.kind == "nan"]
    if not broken:
        return None
    return BottleneckDiagnosis(
        kind=BottleneckKind.NOT_FINITE,
        text=f"{broken[0].text.rstrip('.')}.",
        share=0.0,
        next=Recommendation(text="Try a lower learning rate, or clip the gradients."),
    )


def hang_verdict(hang: Hang | None) -> dict[str, Any] | None:
    """Return why a job makes no step, as `as_json` does; None without a hang."""
    return None if hang is None else {"kind": "hang", "text": hang.text, "words": hang.next}


def as_json(found: BottleneckDiagnosis | None, places: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what the browser draws: a sentence, and a suggestion as text or as a setting.

    `places` has the sidebar's group of each setting.
    """
    if found is None or found.next is None:
        return None
    step = found.next
    drawn: dict[str, Any] = {"kind": found.kind.value, "text": found.text}
    if step.name is None:
        return drawn | {"words": step.text}
    said = setting_text(step.name, step.value)
    setting = {"field": step.name, "value": step.value, "text": said}
    return drawn | {"setting": setting | {"place": places.get(step.name)}}
